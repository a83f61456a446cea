"""The linear layer in float64, obviously right, and the rounding of its activations."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, K] @ weight [N, K].T`` in float64, rounded once to float32: ``[T, N]``."""
    return (x.double() @ weight.double().T).float()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest bfloat16 of every float32, ties to even; below its normal numbers zero."""
    nearest = x.bfloat16().float()
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, nearest)
