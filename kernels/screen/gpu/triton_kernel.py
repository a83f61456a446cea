"""The screen of a 1-bit tier in Triton: a program per panel of weight rows and a few hidden rows.

Sums are 32-bit integers, so their order does not matter, and the last step is the float64 scaling
of the CPU kernel: equal integer hidden states give equal estimates, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from lexshard.kernels.quantize.layout import PANEL_ROWS
from lexshard.kernels.quantize.tiers import OneBitTier
from lexshard.kernels.screen.hidden import (
    TierVectors,
    padded_columns,
    quantize_hidden,
    tier_vectors,
)
from lexshard.kernels.screen.types import Screened

LARGEST_QUERIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSigns:
    """A 1-bit tier whose arrays lie on a device, in the panels of `kernels.quantize.layout`."""

    tier: OneBitTier
    signs: torch.Tensor  # [ceil(V / 64), D / 8, 64] uint8
    multipliers: torch.Tensor  # [ceil(V / 64), D / 128, 64] uint8
    scale: torch.Tensor  # [V] float64, what an integer of the screen stands for
    row_slack: torch.Tensor  # [2, V] fp32
    products: torch.Tensor | None  # [V] fp32
    vectors: TierVectors


def place(tier: OneBitTier, device: torch.device | str) -> PlacedSigns:
    """``tier`` on a device, for `screen`."""

    def move(array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    common = tier.common
    return PlacedSigns(
        tier,
        move(tier.signs),
        move(tier.multipliers),
        move(tier.scale).double(),
        move(tier.row_slack),
        None if common is None else move(common.products),
        tier_vectors(tier, device),
    )


@triton.jit
def signs_kernel(  # type: ignore[no-untyped-def]
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
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """One panel of ROWS rows, scaled as the CPU kernel does, without fused multiply-adds."""
    panel = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + lane
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    inside = row < size
    present = query < count
    place = (lane // 32) * 32 + 2 * (lane % 16) + (lane % 32) // 16
    byte = tl.arange(0, 16)
    total = tl.zeros((ROWS, QUERIES), tl.int32)
    for block in range(columns // 128):
        first = panel * (columns // 8) + block * 16
        code = tl.load(signs + (first + byte)[None, :] * ROWS + place[:, None]).to(tl.int32)
        address = hidden + query.to(tl.int64)[:, None] * columns + (block * 128 + 8 * byte)[None, :]
        part = tl.zeros((ROWS, QUERIES), tl.int32)
        for bit in tl.static_range(8):
            words = tl.load(address + bit, mask=present[:, None], other=0).to(tl.int32)
            sign = ((code >> bit) & 1) * 2 - 1
            part += tl.sum(sign[:, None, :] * words[None, :, :], axis=2)
        factor = tl.load(multipliers + (panel * (columns // 128) + block) * ROWS + lane)
        total += part * factor.to(tl.int32)[:, None]
    unit = tl.load(scale + row, mask=inside, other=0.0)[:, None]
    unit = unit * tl.load(step + query, mask=present, other=0.0)[None, :]
    value = total.to(tl.float64) * unit
    value += tl.load(offset + query, mask=present, other=0.0)[None, :]
    if COMMON:
        product = tl.load(products + row, mask=inside, other=0.0).to(tl.float64)
        value += tl.load(share + query, mask=present, other=0.0)[None, :] * product[:, None]
    target = query.to(tl.int64)[None, :] * size + row[:, None]
    tl.store(result + target, value.to(tl.float32), mask=inside[:, None] & present[None, :])


def screen(hidden: torch.Tensor, placed: PlacedSigns) -> Screened:
    """`kernels.screen.screen` of ``hidden`` [N, d] fp32 on the device of ``placed``.

    Nothing is waited for, and values are not checked.
    """
    tier, device = placed.tier, placed.signs.device
    states = hidden.to(device=device, dtype=torch.float32)
    quantized = quantize_hidden(states, tier, placed.vectors)
    count, size = len(states), len(placed.scale)
    result = torch.empty(count, size, dtype=torch.float32, device=device)
    queries = min(triton.next_power_of_2(max(count, 1)), LARGEST_QUERIES)
    common = placed.products is not None
    signs_kernel[(triton.cdiv(size, PANEL_ROWS), triton.cdiv(count, queries))](
        placed.signs,
        placed.multipliers,
        placed.scale,
        placed.products if common else placed.scale,
        quantized.values,
        quantized.step,
        quantized.share,
        quantized.offset,
        result,
        size,
        count,
        padded_columns(tier),
        COMMON=common,
        ROWS=PANEL_ROWS,
        QUERIES=queries,
        enable_fp_fusion=False,
    )
    return Screened(result, placed.row_slack, quantized.hidden_slack)
