"""Approximate logits from low-precision rows, each with a bound on its error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.quantize.tiers import Int4Tier, Tier
from lexshard.kernels.screen import cpu
from lexshard.kernels.screen.types import WORTH_REFINING, HiddenBits, QuantizedHidden, Screened

__all__ = ["WORTH_REFINING", "Screened", "refine", "screen"]


def screen(
    hidden: npt.NDArray[np.float32] | torch.Tensor,
    tier: Tier,
    *,
    hidden_bits: HiddenBits | None = None,
) -> Screened:
    """Estimates of ``<W_i, h_n>`` for ``hidden`` [N, d] fp32 and all rows of ``tier``.

    Hidden states become 16-bit integers as fine as 32-bit sums allow; the products with the tier's
    integers are then exact, and each estimate is scaled and rounded to fp32 once. The bound holds
    always for int8 and int4, and with the tier's probability per row for the others. On a CUDA
    device see `kernels.screen.gpu`.

    Five or more hidden states meet an int8 tier as 8-bit integers where the processor multiplies
    those faster (AVX512-VNNI) and none of them loses much by it; the bound then includes that
    loss. A row's estimates and slack depend on its own hidden state and on this choice, which the
    rows beside it may decide, and on nothing else; that they keep the bound depends on neither.
    ``hidden_bits`` chooses; 8 gives the same bits on processors without these instructions.

    Raises ValueError for shapes that do not fit, for NaN or infinity, and for 8 ``hidden_bits``
    of a tier that is not int8.
    """
    quantized = _quantized(hidden, tier, hidden_bits)
    estimate = cpu.screen(quantized, tier)
    return Screened(estimate, tier.row_slack, quantized.hidden_slack)


def refine(
    hidden: npt.NDArray[np.float32] | torch.Tensor,
    tier: Int4Tier,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> Screened:
    """Better estimates for a few rows, from both nibble planes.

    Row ``n`` of ``hidden`` [N, d] meets ``ids[offsets[n]:offsets[n + 1]]``; ``estimate`` is flat,
    [len(ids)]. ``row_slack`` [2, V] still belongs to all rows. Raises as `screen` does.
    """
    quantized = _quantized(hidden, tier)
    ids, offsets = np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(offsets, np.int64)
    estimate = cpu.refine(quantized, tier, ids, offsets)
    return Screened(estimate, tier.fine_row_slack, quantized.hidden_slack)


def _quantized(
    hidden: npt.NDArray[np.float32] | torch.Tensor,
    tier: Tier,
    hidden_bits: HiddenBits | None = None,
) -> QuantizedHidden:
    fits = hidden.ndim == 2 and hidden.shape[1] == tier.columns
    if not fits or hidden.dtype not in (np.float32, torch.float32):
        raise ValueError(
            f"hidden [N, {tier.columns}] in fp32 expected, got {tuple(hidden.shape)} {hidden.dtype}"
        )
    array = hidden.detach().numpy() if isinstance(hidden, torch.Tensor) else hidden
    return cpu.quantize_hidden(array, tier, hidden_bits)
