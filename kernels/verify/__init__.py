"""Which drafted tokens stand, and what replaces the others, straight from logits.

A draft ``x`` stands if ``u < p(x) / q(x)``, else a draw from ``max(0, p - q)`` takes its place
(Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2; equations 1 to 3 of "Optimized
Speculative Sampling"): the token that is emitted has the target's distribution.

With sigmoids in the place of softmaxes (section 3.2.2, equation 5) two logits decide, and it has
not: the weights do not add up to 1, and the wider alpha and beta are apart, the more alike they
are. With the paper's -10^4 and 10^4 every weight is 0.6225, nearly every draft stands, whatever the
target thinks of it, and what replaces one is drawn from nearly all tokens alike. On a pair that is
a total variation of 0.449 apart, what is emitted is 0.410 from the target with -1 and 1, 0.443 with
-10 and 10, 0.449 with -1000 and 1000 (`tests/kernels/test_sigmoid.py`).

`try_guess` decides the same from bounds on the logits of a row: a guess stands where ``u < p(x) /
q(x)`` for every normaliser of ``p`` within them, and not where for none. What takes its place is
the argmax of ``log max(0, p - q)`` plus noise. With ``Z`` the row's mass that is the argmax of
``log(exp(s l) - q Z)`` plus noise: outside of what the drafter looked at it is ``s l`` plus noise,
without any normaliser. Tokens whose upper bound of that reaches the best lower bound are its only
candidates. Wherever float64's roundings in `verify` might tell otherwise (``GAP``), nothing is
decided.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.verify import cpu
from lexshard.kernels.verify.bounded import replacement, try_guess
from lexshard.kernels.verify.checks import check
from lexshard.kernels.verify.types import (
    OPEN,
    REPLACED,
    STANDS,
    BoundedRow,
    DenseProposals,
    DraftedRows,
    Finding,
    Limits,
    Proposals,
    ProposedGuess,
    Verdict,
)

__all__ = [
    "OPEN",
    "REPLACED",
    "STANDS",
    "BoundedRow",
    "DenseProposals",
    "DraftedRows",
    "Finding",
    "Limits",
    "ProposedGuess",
    "Verdict",
    "replacement",
    "try_guess",
    "verify",
]


def verify(
    logits: npt.NDArray[np.float32],
    rows: DraftedRows,
    *,
    proposals: Proposals = None,
    sigmoid: Limits | None = None,
) -> Verdict:
    """What each of ``rows`` emits, given the target's ``logits`` [R, V] (contiguous, no NaN).

    The caller has applied everything that comes before temperature, per row and with the drafts
    before it taken as written: `kernels.penalties.adjust` for penalties, bias and bans, then
    ``-inf`` for every token that `kernels.truncate.truncate` leaves out. ``proposals`` are what the
    drafts were drawn from, None of a drafter that was certain. With ``sigmoid``,
    alpha and beta, ``p`` and ``q`` are the weights ``sigmoid((l s - alpha) / (beta - alpha))``;
    where no weight of the target is above the drafter's, ``p`` alone is drawn from.

    Random numbers depend on (key, position) alone; `kernels.verify.reference` says how. A row does
    not depend on the others: of a sequence's, those behind the first that does not stand mean
    nothing. Raises ValueError where shapes, types or values are not as said.
    """
    check(logits, rows, proposals, sigmoid)
    return cpu.verify(logits, rows, proposals, sigmoid)
