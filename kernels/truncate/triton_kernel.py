"""The masses of whole rows where their logits are: the integers of the CPU, bit for bit.

The exponential is additions and multiplications in float64, in the order of
`kernels.exponential.double_precision`; launched so that none of them are fused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lexshard.kernels.exponential import double_precision as exact
from lexshard.kernels.truncate.reference import MASS_UNIT

TOKENS = 1024  # of a program

_INVERSE_LN2 = tl.constexpr(exact.INVERSE_LN2)
_LN2_HIGH, _LN2_LOW = tl.constexpr(exact.LN2_HIGH), tl.constexpr(exact.LN2_LOW)
_ROUNDER, _ROUNDER_BITS = tl.constexpr(exact.ROUNDER), tl.constexpr(exact.ROUNDER_BITS)
_SMALLEST = tl.constexpr(exact.SMALLEST)
_COEFFICIENTS = tl.constexpr(exact.COEFFICIENTS)
_UNIT = tl.constexpr(MASS_UNIT)


class Masses(NamedTuple):
    """Of N rows; sums of masses are exact, whatever their order."""

    masses: torch.Tensor  # [N, V] int64
    totals: torch.Tensor  # [N] int64
    keys: torch.Tensor  # [N, V] int64: of a better token larger, of equal ones of the lower id


@triton.jit
def exponential(x):  # type: ignore[no-untyped-def]
    """exp of float64 ``x <= 0``."""
    clamped = tl.where(x > _SMALLEST, x, _SMALLEST)
    rounded = clamped * _INVERSE_LN2 + _ROUNDER
    n = rounded - _ROUNDER
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = tl.zeros_like(r) + _COEFFICIENTS[13]
    for step in tl.static_range(13):
        p = p * r + _COEFFICIENTS[12 - step]
    power = (rounded.to(tl.int64, bitcast=True) - _ROUNDER_BITS + 1023) << 52
    return tl.where(x > _SMALLEST, p * power.to(tl.float64, bitcast=True), 0.0)


@triton.jit(do_not_specialize=["size"])
def _masses_kernel(  # type: ignore[no-untyped-def]
    logits, best, scales, masses, sums, keys, size, TOKENS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < size
    logit = tl.load(logits + row * size + token, mask=inside, other=float("-inf"))
    logit = tl.where(logit == 0.0, 0.0, logit)  # -0 is 0
    scale = tl.load(scales + row)
    scaled, largest = logit.to(tl.float64) * scale, tl.load(best + row).to(tl.float64) * scale
    mass = exponential(tl.where(scaled == largest, 0.0, scaled - largest)) * _UNIT
    mass = ((mass + _ROUNDER) - _ROUNDER).to(tl.int64)  # to the nearest, halves to even
    tl.store(masses + row * size + token, mass, mask=inside)
    tl.store(sums + row * tl.num_programs(0) + tl.program_id(0), tl.sum(mass, 0))
    bits = logit.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    tl.store(keys + row * size + token, (order << 32) + (size - 1 - token), mask=inside)


def row_masses(logits: torch.Tensor, inverse_temperature: torch.Tensor) -> Masses:
    """Of ``logits`` [N, V] fp32 at ``inverse_temperature`` [N] float64, above 0, relative to each
    row's best. Nothing waits for the device."""
    rows, size = logits.shape
    programs = triton.cdiv(size, TOKENS)
    masses = torch.empty(rows, size, dtype=torch.int64, device=logits.device)
    keys = torch.empty_like(masses)
    sums = torch.empty(rows, programs, dtype=torch.int64, device=logits.device)
    best = logits.amax(dim=1)
    _masses_kernel[(programs, rows)](
        logits.contiguous(),
        best,
        inverse_temperature.contiguous(),
        masses,
        sums,
        keys,
        size,
        TOKENS=TOKENS,
        enable_fp_fusion=False,
    )
    return Masses(masses, sums.sum(dim=1), keys)
