"""Whether a guess stands, and what replaces it, from bounds on the logits of its row.

What `kernels.verify` decides from every logit is decided here from few, and the
same: with the same uniform ``u``, a guess ``x`` stands where ``u < p(x) / q(x)`` for every
normaliser of ``p`` within the bounds, and not where for none. What takes its place is the argmax of
``log max(0, p - q)`` plus noise. With ``Z`` the row's mass that is the argmax of ``log(exp(s l) -
q Z)`` plus noise: outside of what the drafter looked at it is ``s l`` plus noise, without any
normaliser. Tokens whose upper bound of that reaches the best lower bound are its only candidates.

`kernels.verify` decides as real numbers would but for float64's roundings. Wherever these might
tell otherwise (``GAP``), nothing is decided here.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.verify_bounded import cpu, reference
from lexshard.kernels.verify_bounded.types import (
    OPEN,
    REPLACED,
    STANDS,
    BoundedRow,
    Finding,
    ProposedGuess,
)

Implementation = Literal["reference", "cpu"]

__all__ = [
    "OPEN",
    "REPLACED",
    "STANDS",
    "BoundedRow",
    "Finding",
    "ProposedGuess",
    "replacement",
    "try_guess",
]


def try_guess(
    row: BoundedRow, guess: ProposedGuess, *, implementation: Implementation | None = None
) -> Finding:
    """What the bounds of ``row`` say of ``guess``, whose own logit they enclose exactly
    (``lower[token] == upper[token]``).

    OPEN where they are too loose, where a bound is infinite above, where nothing may be left to
    take the guess's place, or where there are more candidates than are worth a look.
    """
    return _module(implementation).try_guess(row, guess)


def replacement(
    logits: npt.NDArray[np.float32],
    finding: Finding,
    row: BoundedRow,
    guess: ProposedGuess,
    *,
    implementation: Implementation | None = None,
) -> int:
    """The token that takes the guess's place, given the ``logits`` [K] of the finding's ``ids``; -1
    where the bounds on the row's mass are too loose to tell."""
    return _module(implementation).replacement(logits, finding, row, guess)


def _module(implementation: Implementation | None) -> Any:
    return reference if implementation == "reference" else cpu
