"""Weights of every flavour that tiers are made of."""

from __future__ import annotations

import torch

KINDS = ("int8", "int4", "int4-dither", "1-bit")


SHAPES = ("random", "clustered", "duplicate", "zero", "huge", "denormal", "mixed", "constant")


def weights(seed: int, shape: str, rows: int, columns: int) -> torch.Tensor:
    """Output weights [rows, columns] of a stated geometry, fp32."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    if shape == "clustered":
        weight = weight[torch.arange(rows) % 3] + 0.05 * weight
    elif shape == "duplicate":
        weight = weight[torch.arange(rows) // 2]
    elif shape == "zero":
        weight[::2] = 0.0
    elif shape == "huge":
        weight *= 1e25
    elif shape == "denormal":
        weight *= 1e-42
    elif shape == "mixed":  # every row and every group of its columns of another magnitude
        weight *= torch.exp(6 * torch.randn(rows, 1, generator=generator))
        weight *= torch.exp(3 * torch.randn(columns, generator=generator))
    elif shape == "constant":  # the largest integer norm there is
        weight = weight[:, :1].sign().expand(rows, columns).contiguous()
    return weight
