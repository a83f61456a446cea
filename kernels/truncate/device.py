"""Top-p of whole rows where their logits are: torch's functions, and the very tokens of the CPU.

Masses are integers and the exponential is additions and multiplications in float64, each of which
is a launch of its own, so that no device can fuse two of them: every bit is the CPU's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lexshard.kernels.exponential.double_precision import (
    COEFFICIENTS,
    INVERSE_LN2,
    LN2_HIGH,
    LN2_LOW,
    ROUNDER,
    ROUNDER_BITS,
    SMALLEST,
)
from lexshard.kernels.truncate.reference import MASS_UNIT


class Nuclei(NamedTuple):
    """The tokens that top-p leaves of N rows, best first; those behind ``counts`` mean nothing."""

    ids: torch.Tensor  # [N, K] int64
    counts: torch.Tensor  # [N] int64, above K where there was no room for all


def nuclei(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, top_p: torch.Tensor, room: int
) -> Nuclei:
    """What `kernels.truncate.truncate` leaves of ``logits`` [N, V] fp32 by ``top_p`` alone.

    ``inverse_temperature`` [N] float64, above 0, holds fp32 values, ``top_p`` [N] is float64; all
    lie on one device. K is ``room``, or V where that is less. Nothing waits for the device.
    """
    size = logits.shape[1]
    scaled = logits.double().mul_(inverse_temperature[:, None])
    best = scaled.amax(dim=1, keepdim=True)
    distance = torch.where(scaled == best, 0.0, scaled.sub_(best))
    masses = _exponential(distance).mul_(MASS_UNIT).round_().long()
    total = masses.sum(dim=1)
    target = torch.minimum((top_p * total.double()).ceil().long().clamp_(min=1), total)
    # Integers that order as logits do (-0 as 0), ties to the lower id.
    bits = (logits + 0.0).view(torch.int32)
    places = torch.arange(size - 1, -1, -1, device=logits.device)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long().mul_(1 << 32).add_(places)
    ids = size - 1 - (keys.topk(min(room, size), dim=1).values & 0xFFFFFFFF)
    sums = masses.gather(1, ids).cumsum(dim=1)
    counts = (sums < target[:, None]).sum(dim=1) + 1
    return Nuclei(ids, counts)


def _exponential(x: torch.Tensor) -> torch.Tensor:
    """`kernels.exponential.double_precision.exponential_array` of a tensor."""
    clamped = x.clamp(min=SMALLEST)
    rounded = clamped.mul(INVERSE_LN2).add_(ROUNDER)
    n = rounded - ROUNDER
    r = clamped.sub_(n * LN2_HIGH).sub_(n.mul_(LN2_LOW))
    p = torch.full_like(r, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        p.mul_(r).add_(coefficient)
    power = rounded.view(torch.int64).sub(ROUNDER_BITS - 1023).mul_(1 << 52)
    return torch.where(x > SMALLEST, p.mul_(power.view(torch.float64)), 0.0)
