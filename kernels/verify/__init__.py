"""Which drafted tokens stand, and the token after them, straight from logits."""

from __future__ import annotations

from typing import Any, Literal

from lexshard.kernels.verify import cpu, reference
from lexshard.kernels.verify.checks import check_proposals, check_rows
from lexshard.kernels.verify.types import (
    DenseProposals,
    DraftedRows,
    Proposals,
    SparseProposals,
    Verdict,
)

Implementation = Literal["reference", "cpu", "triton"]
Mode = Literal["exact", "coupled", "greedy"]

__all__ = ["DenseProposals", "DraftedRows", "SparseProposals", "Verdict", "verify"]


def verify(
    logits: Any,
    rows: DraftedRows,
    *,
    mode: Mode,
    proposals: Proposals = None,
    implementation: Implementation | None = None,
) -> Verdict:
    """Verify the drafts of a batch.

    ``logits`` [R, V] fp32 are the target's (contiguous: numpy, or a torch tensor on a CUDA device,
    where the results stay and nothing is waited for). The caller has
    applied everything that comes before temperature, per row and with the drafts before it taken
    as written: `kernels.penalties.adjust` for penalties, bias and bans, then ``-inf`` for every
    token that `kernels.truncate.truncate` leaves out. No logit is NaN. Temperature is applied here.

    - ``exact``: draft ``x`` stands if ``u < p(x) / q(x)``. The first that does not is replaced by a
      draw from ``max(0, p - q)``; where all stand, one more token is drawn from the last row. Each
      emitted token has the target's distribution (Leviathan et al. 2023, algorithm 1; Chen et
      al. 2023, algorithm 2; equations 1 to 3 of "Optimized Speculative Sampling") if each draft
      was drawn from its own proposal: dense, sparse, or (``proposals=None``) a drafter that was
      certain of it. A proposal has no part in the rows of a sequence whose temperature is 0.
    - ``coupled``: every row draws its token as `kernels.draw.draw` would; a draft stands if it is
      that token. Emits what plain decoding would have, whatever the drafter.
    - ``greedy``: as ``coupled``, at temperature 0.

    Random numbers depend on (key, position) alone; `kernels.verify.reference` says how. Rows after
    the first rejection change nothing. Raises ValueError where shapes, types or values are not as
    said; what is on a device is not looked at, and a draft there beyond the vocabulary is rejected.
    """
    chosen = implementation or ("triton" if getattr(logits, "is_cuda", False) else "cpu")
    if mode not in ("exact", "coupled", "greedy"):
        raise ValueError(f"mode {mode!r} is none of exact, coupled, greedy")
    if mode != "exact" and proposals is not None:
        raise ValueError(f"{mode} verification compares tokens; leave the proposals out")
    check_rows(logits, rows)
    check_proposals(logits, rows, proposals)
    if chosen == "triton":
        from lexshard.kernels.verify import triton_kernel

        return triton_kernel.verify(logits, rows, mode, proposals)
    module = reference if chosen == "reference" else cpu
    return module.verify(logits, rows, mode, proposals)
