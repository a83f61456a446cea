"""Canonical logits: the one arithmetic that decides every token, whatever screened for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.rows import cpu
from lexshard.kernels.rows.postprocess import postprocess

__all__ = ["as_array", "canonical_logits", "postprocess"]


def canonical_logits(
    hidden: npt.NDArray[np.float32] | torch.Tensor,
    weight: npt.NDArray[Any] | torch.Tensor,
    ids: npt.NDArray[np.int32] | torch.Tensor | None = None,
    offsets: npt.NDArray[np.int64] | torch.Tensor | None = None,
) -> npt.NDArray[np.float32]:
    """``fp32(<weight_i, hidden_r>)``, summed in float64 over 16 lanes and a fixed tree.

    Lane ``j`` sums columns ``j, j + 16, ...`` in order; then lanes ``j`` and ``j + 8`` are added,
    ``j`` and ``j + 4``, ``j`` and ``j + 2``, and the last two. Products of fp32 and bf16 values
    are exact in float64, so fused multiply-adds change nothing.

    ``hidden`` [N, d] fp32. ``weight`` [V, d] fp32 or bf16 (a torch tensor, or numpy ``uint16``
    with the bf16 bits). With ``ids`` [total] and ``offsets`` [N + 1], row ``r`` of ``hidden``
    meets ``ids[offsets[r]:offsets[r + 1]]`` and the result is [total]; without them the result is
    [N, V]. For tensors on a GPU see `kernels.rows.triton_kernel`.
    Raises `ValueError` on shapes or types that do not fit.
    """
    if (ids is None) != (offsets is None):
        raise ValueError("ids and offsets go together")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [N, d] and weight [V, d] expected, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    return cpu.canonical_logits(
        np.ascontiguousarray(as_array(hidden), np.float32),
        np.ascontiguousarray(as_array(weight)),
        None if ids is None else np.ascontiguousarray(as_array(ids), np.int32),
        None if offsets is None else np.ascontiguousarray(as_array(offsets), np.int64),
    )


def as_array(values: Any) -> npt.NDArray[Any]:
    """A view of a CPU tensor (bf16 as its bits, ``uint16``), or what `numpy.asarray` gives.

    `canonical_logits` takes either; who calls it often converts once. Raises `ValueError` for
    floats that are neither fp32 nor bf16.
    """
    if not isinstance(values, torch.Tensor):
        array = np.asarray(values)
    elif values.dtype == torch.bfloat16:
        array = values.detach().view(torch.uint16).numpy()
    else:
        array = values.detach().numpy()
    if array.dtype.kind == "f" and array.dtype != np.float32:
        raise ValueError(f"fp32 or bf16 expected, got {array.dtype}: convert it first")
    return array
