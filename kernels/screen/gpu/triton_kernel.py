"""The screens in Triton: a program per block of weight rows and a few hidden rows.

Sums are 32-bit integers, so their order does not matter, and the last step is the float64 scaling
of the CPU kernel: equal integer hidden states give equal estimates, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.quantize.layout import PANEL_ROWS
from kernels.quantize.tiers import DitheredInt4Tier, Int8Tier, OneBitTier, Tier
from kernels.screen import Screened
from kernels.screen.hidden import TierVectors, padded_columns, quantize_hidden, tier_vectors

ROWS = 32
LARGEST_QUERIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTier:
    """A tier whose arrays lie on a device."""

    tier: Tier
    values: torch.Tensor  # [V, D] int8, [V, D / 2] int8 of two nibbles, or signs in panels
    multipliers: torch.Tensor | None  # [V, D / 32] uint8, in panels for signs; None for int8
    scale: torch.Tensor  # [V] float64, what an integer of the screen stands for
    row_slack: torch.Tensor  # [2, V] fp32
    products: torch.Tensor | None  # [V] fp32
    vectors: TierVectors


def place(tier: Tier, device: torch.device | str) -> DeviceTier:
    """``tier`` on a device, for `kernels.screen.screen`; of an int4 tier the high plane."""

    def move(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    multipliers = None
    scale = move(tier.scale).double()
    if isinstance(tier, Int8Tier):
        values = move(tier.values)
    elif isinstance(tier, DitheredInt4Tier):
        values, multipliers = move(tier.nibbles), move(tier.multipliers)
    elif isinstance(tier, OneBitTier):
        values, multipliers = move(tier.signs), move(tier.multipliers)
    else:
        values, multipliers = move(tier.high), move(tier.multipliers)
        scale = 16.0 * scale
    common = tier.common
    return DeviceTier(
        tier,
        values if isinstance(tier, OneBitTier) else values.view(torch.int8),
        multipliers,
        scale,
        move(tier.row_slack),
        None if common is None else move(common.products),
        tier_vectors(tier, device),
    )


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    total,
    scale,
    products,
    step,
    share,
    offset,
    result,
    row,
    query,
    size,
    count,
    COMMON: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Scales ``total`` [ROWS, QUERIES] as the CPU kernel does, without fused multiply-adds."""
    inside = row < size
    present = query < count
    unit = tl.load(scale + row, mask=inside, other=0.0)[:, None]
    unit = unit * tl.load(step + query, mask=present, other=0.0)[None, :]
    value = total.to(tl.float64) * unit
    if CENTRE:
        value += tl.load(offset + query, mask=present, other=0.0)[None, :]
    if COMMON:
        product = tl.load(products + row, mask=inside, other=0.0).to(tl.float64)
        value += tl.load(share + query, mask=present, other=0.0)[None, :] * product[:, None]
    place = query.to(tl.int64)[None, :] * size + row[:, None]
    tl.store(result + place, value.to(tl.float32), mask=inside[:, None] & present[None, :])


@triton.jit
def _bytes_kernel(  # type: ignore[no-untyped-def]
    values,
    scale,
    products,
    hidden,
    step,
    share,
    offset,
    result,
    size,
    count,
    columns,
    COMMON: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    inside = (row < size)[:, None]
    present = (query < count)[:, None]
    lane = tl.arange(0, 64)
    total = tl.zeros((ROWS, QUERIES), tl.int32)
    for start in range(0, columns, 64):
        place = (start + lane)[None, :]
        weights = tl.load(
            values + row.to(tl.int64)[:, None] * columns + place, mask=inside, other=0
        ).to(tl.int32)
        words = tl.load(
            hidden + query.to(tl.int64)[:, None] * columns + place, mask=present, other=0
        ).to(tl.int32)
        total += tl.sum(weights[:, None, :] * words[None, :, :], axis=2)
    _store(
        total,
        scale,
        products,
        step,
        share,
        offset,
        result,
        row,
        query,
        size,
        count,
        COMMON,
        CENTRE,
    )


@triton.jit
def _nibbles_kernel(  # type: ignore[no-untyped-def]
    values,
    multipliers,
    scale,
    products,
    hidden,
    starts,
    step,
    share,
    offset,
    result,
    size,
    count,
    columns,
    COMMON: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    inside = (row < size)[:, None]
    present = (query < count)[:, None]
    wide_row = row.to(tl.int64)[:, None]
    wide_query = query.to(tl.int64)[:, None]
    byte = tl.arange(0, 64)
    # The hidden words of 32 low nibbles lie before those of the 32 high ones.
    low_place = (byte // 32) * 64 + byte % 32
    group = tl.arange(0, 4)
    total = tl.zeros((ROWS, QUERIES), tl.int32)
    for block in range(columns // 128):
        both = tl.load(
            values + wide_row * (columns // 2) + (block * 64 + byte)[None, :], mask=inside, other=0
        ).to(tl.int32)
        address = hidden + wide_query * columns + (block * 128 + low_place)[None, :]
        low_words = tl.load(address, mask=present, other=0).to(tl.int32)
        high_words = tl.load(address + 32, mask=present, other=0).to(tl.int32)
        low = (both << 28) >> 28
        high = both >> 4
        sums = low[:, None, :] * low_words[None, :, :] + high[:, None, :] * high_words[None, :, :]
        # Places 4 g to 4 g + 3 of every step belong to group g.
        sums = tl.sum(tl.reshape(sums, (ROWS, QUERIES, 4, 4, 4)), axis=4)
        sums = tl.sum(sums, axis=2)
        begin = starts + wide_query * (columns // 16) + (block * 8 + 2 * group)[None, :]
        begins = tl.load(begin, mask=present, other=0) + tl.load(begin + 1, mask=present, other=0)
        factors = tl.load(
            multipliers + wide_row * (columns // 32) + (block * 4 + group)[None, :],
            mask=inside,
            other=0,
        ).to(tl.int32)
        total += tl.sum((sums + begins[None, :, :]) * factors[:, None, :], axis=2)
    _store(
        total,
        scale,
        products,
        step,
        share,
        offset,
        result,
        row,
        query,
        size,
        count,
        COMMON,
        CENTRE,
    )


@triton.jit
def _bits_kernel(  # type: ignore[no-untyped-def]
    signs,
    multipliers,
    scale,
    products,
    hidden,
    step,
    share,
    offset,
    result,
    size,
    count,
    columns,
    COMMON: tl.constexpr,
    CENTRE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """One panel of 64 rows, in the order of `kernels.quantize.layout`."""
    panel = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + lane
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    present = (query < count)[:, None]
    place = (lane // 32) * 32 + 2 * (lane % 16) + (lane % 32) // 16
    byte = tl.arange(0, 16)
    total = tl.zeros((ROWS, QUERIES), tl.int32)
    for block in range(columns // 128):
        first = panel * (columns // 8) + block * 16
        code = tl.load(signs + (first + byte)[None, :] * ROWS + place[:, None]).to(tl.int32)
        address = hidden + query.to(tl.int64)[:, None] * columns + (block * 128 + 8 * byte)[None, :]
        part = tl.zeros((ROWS, QUERIES), tl.int32)
        for bit in tl.static_range(8):
            words = tl.load(address + bit, mask=present, other=0).to(tl.int32)
            sign = ((code >> bit) & 1) * 2 - 1
            part += tl.sum(sign[:, None, :] * words[None, :, :], axis=2)
        factor = tl.load(multipliers + (panel * (columns // 128) + block) * ROWS + lane)
        total += part * factor.to(tl.int32)[:, None]
    _store(
        total,
        scale,
        products,
        step,
        share,
        offset,
        result,
        row,
        query,
        size,
        count,
        COMMON,
        CENTRE,
    )


def screen(hidden: torch.Tensor, placed: DeviceTier) -> Screened:
    """`kernels.screen.screen` on the device of ``placed``; values are not checked there."""
    tier, device = placed.tier, placed.values.device
    states = hidden.to(device=device, dtype=torch.float32)
    columns = padded_columns(tier)
    quantized = quantize_hidden(states, tier, placed.vectors)
    count, size = len(states), len(placed.scale)
    result = torch.empty(count, size, dtype=torch.float32, device=device)
    queries = min(triton.next_power_of_2(max(count, 1)), LARGEST_QUERIES)
    common, rotated = placed.products is not None, isinstance(tier, OneBitTier)
    rows = PANEL_ROWS if rotated else ROWS
    last = (
        quantized.step,
        quantized.share,
        quantized.offset,
        result,
        size,
        count,
        columns,
        common,
        rotated,
        rows,
        queries,
    )
    products = placed.products if common else placed.scale
    grid = (triton.cdiv(size, rows), triton.cdiv(count, queries))
    if placed.multipliers is None:
        _bytes_kernel[grid](
            placed.values, placed.scale, products, quantized.values, *last, enable_fp_fusion=False
        )
        return Screened(result, placed.row_slack, quantized.hidden_slack)
    first = (placed.values, placed.multipliers, placed.scale, products, quantized.values)
    if rotated:
        _bits_kernel[grid](*first, *last, enable_fp_fusion=False)
    else:
        _nibbles_kernel[grid](*first, quantized.starts, *last, enable_fp_fusion=False)
    return Screened(result, placed.row_slack, quantized.hidden_slack)
