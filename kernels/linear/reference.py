"""The linear layer in float64, obviously right."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [T, K] @ weight [N, K].T`` in float64, rounded once to float32: ``[T, N]``."""
    return (x.double() @ weight.double().T).float()
