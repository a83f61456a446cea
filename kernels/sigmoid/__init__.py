"""Verification with sigmoids in place of softmaxes: fewer reads, and not the target's distribution.

The approximation of "Optimized Speculative Sampling" (section 3.2.2, equation 5). Off by default
and not exact: its weights do not add up to 1, and the wider alpha and beta are apart, the more
alike they are. With the paper's -10^4 and 10^4 every weight is 0.6225, nearly every draft stands,
whatever the target thinks of it, and what replaces one is drawn from nearly all tokens alike. On a
pair that is a total variation of 0.449 apart, what is emitted is 0.410 from the target with -1 and
1, 0.443 with -10 and 10, 0.449 with -1000 and 1000 (`tests/kernels/test_sigmoid.py`).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from lexshard.kernels.sigmoid import cpu, reference
from lexshard.kernels.verify import DenseProposals, DraftedRows, Verdict
from lexshard.kernels.verify.checks import check_proposals, check_rows

Implementation = Literal["reference", "cpu", "triton"]

__all__ = ["verify_by_sigmoid"]


def verify_by_sigmoid(
    logits: Any,
    rows: DraftedRows,
    proposals: DenseProposals,
    *,
    alpha: float,
    beta: float,
    implementation: Implementation | None = None,
) -> Verdict:
    """Verify the drafts of a batch with the weights ``sigmoid((l s - alpha) / (beta - alpha))``.

    ``logits`` [R, V], ``rows`` and ``proposals`` are those of `kernels.verify.verify` in its mode
    ``exact``, with everything applied that it says, and so are the random numbers and the errors
    raised (`ValueError` also where not ``alpha < 0 < beta``). ``p`` and ``q`` are the weights
    above, ``s`` the inverse temperature of each: a draft ``x`` stands if ``u < p(x) / q(x)``, which
    reads two logits; the first that does not is replaced by a draw from ``max(0, p - q)``, or from
    ``p`` where no weight of the target is above the drafter's; where all stand one more token is
    drawn from ``p``. So one row of each is read. Rows of temperature 0 are decided as there,
    on a GPU refused.
    """
    if not (-math.inf < alpha < 0 < beta < math.inf):
        raise ValueError(f"alpha {alpha} must be below 0 and beta {beta} above, both finite")
    check_rows(logits, rows)
    if not isinstance(proposals, DenseProposals):
        raise ValueError("sigmoids need the drafter's logits: pass dense proposals")
    check_proposals(logits, rows, proposals)
    chosen = implementation or ("triton" if getattr(logits, "is_cuda", False) else "cpu")
    if chosen == "triton":
        from lexshard.kernels.sigmoid import triton_kernel

        return triton_kernel.verify_by_sigmoid(logits, rows, proposals, alpha, beta)
    module = reference if chosen == "reference" else cpu
    return module.verify_by_sigmoid(logits, rows, proposals, alpha, beta)
