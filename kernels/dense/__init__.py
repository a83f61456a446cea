"""The dense way to a token, fused: all logits, noise and argmax in one pass over the weights.

The baseline that a certified search is compared with (the idea of FlashSampling: logits never
leave the chip). Its logits are sums in fp32 whose order the implementation chooses, so its tokens
are *not* canonical: where two scores are closer than their rounding, another implementation, batch
or device may take the other one. Nothing that is served comes from here.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from lexshard.kernels.dense import reference
from lexshard.kernels.dense.types import Draws

Implementation = Literal["reference", "cpu", "triton"]

__all__ = ["Draws", "dense_gumbel"]


def dense_gumbel(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    draws: Draws,
    *,
    implementation: Implementation | None = None,
) -> Any:
    """``argmax_i <W_i, h_n> s_n + g_ni`` of every row: token ids [N] int64, on the device.

    ``hidden`` [N, d] is rounded to the type of ``weight`` [V, d] (fp32 or bf16); products are
    added up in fp32. Without noise where ``s_n`` is 0: greedy. Raises ValueError for shapes that
    do not fit.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [N, d] and weight [V, d] expected, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    chosen = implementation or ("triton" if weight.is_cuda else "cpu")
    rounded = hidden.to(device=weight.device, dtype=weight.dtype)
    if chosen == "triton":
        from lexshard.kernels.dense import triton_kernel

        device_draws = triton_kernel.place(draws, weight.device)
        return triton_kernel.dense_gumbel(rounded, weight, device_draws)
    if chosen == "cpu":
        from lexshard.kernels.dense import cpu  # numba compiles on first use; keep the import cheap

        return cpu.dense_gumbel(rounded, weight, draws)
    return reference.dense_gumbel(rounded, weight, draws)
