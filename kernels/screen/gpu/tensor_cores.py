"""The screen on the tensor cores: 8-bit integer products, exact in 32 bits, for any batch size.

A 16-bit hidden integer is ``256 high + low`` with two signed bytes, so a hidden row becomes two
rows of bytes and the screen an integer matrix product. Weights are read once for up to 64 hidden
rows. Sums wrap at 32 bits on the way and are right in the end, since the whole sum fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from lexshard.kernels.quantize.tiers import Int8Tier
from lexshard.kernels.screen.gpu.hidden_bytes import HiddenBytes, hidden_kernel
from lexshard.kernels.screen.types import Screened, padded_columns

LARGEST_HIDDEN_ROWS = 64  # of a program


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTier:
    """A tier whose arrays lie on a device, in the order the tensor cores take them."""

    tier: Int8Tier
    values: torch.Tensor  # [V, D] int8
    scale: torch.Tensor  # [V] float64, what an integer of the screen stands for
    row_slack: torch.Tensor  # [2, V] fp32
    direction: torch.Tensor | None  # [d] fp32
    products: torch.Tensor | None  # [V] fp32
    constants: torch.Tensor  # [3] float64: room for hidden integers, largest size, ||direction||


def place(tier: Int8Tier, device: torch.device | str) -> PlacedTier:
    """``tier`` on a device, for `screen`."""
    common = tier.common
    length = 1.0 if common is None else float(np.linalg.norm(common.vector.astype(np.float64)))
    room = float(tier.hidden_limit) - math.sqrt(padded_columns(tier)) / 2.0 - 1.0
    return PlacedTier(
        tier,
        torch.from_numpy(tier.values).to(device),
        torch.from_numpy(tier.scale).to(device).double(),
        torch.from_numpy(tier.row_slack).to(device),
        None if common is None else torch.from_numpy(common.vector).to(device),
        None if common is None else torch.from_numpy(common.products).to(device),
        torch.tensor([room, tier.largest_size, length], dtype=torch.float64, device=device),
    )


class Target(NamedTuple):
    """Where the estimates of V rows go, and what turns sums of integers into them."""

    scale: torch.Tensor  # [V] float64
    products: torch.Tensor  # [V] fp32, or anything without a common direction
    result: torch.Tensor  # [N, V] fp32
    size: int  # V


@triton.jit
def bytes_kernel(  # type: ignore[no-untyped-def]
    values,
    hidden,
    target,
    COMMON: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS weight rows x COLUMNS rows of hidden bytes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight_rows = values + row.to(tl.int64)[:, None] * hidden.width
    hidden_rows = hidden.halves + half.to(tl.int64)[None, :] * hidden.width
    row_there, half_there = row < target.size, half < 2 * hidden.rows
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, hidden.width, DEPTH):
        place = start + tl.arange(0, DEPTH)
        valid = place < hidden.width
        weights = tl.load(
            weight_rows + place[None, :], mask=row_there[:, None] & valid[None, :], other=0
        )
        words = tl.load(
            hidden_rows + place[:, None], mask=half_there[None, :] & valid[:, None], other=0
        )
        total = tl.dot(weights, words, total, out_dtype=tl.int32)
    # To estimates, as the CPU's screens scale them.
    low, high = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    sums = low + high * 256
    query = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    there = query < hidden.rows
    unit = tl.load(target.scale + row, mask=row_there, other=0.0)[:, None]
    unit = unit * tl.load(hidden.step + query, mask=there, other=0.0)[None, :]
    value = sums.to(tl.float64) * unit
    if COMMON:
        product = tl.load(target.products + row, mask=row_there, other=0.0).to(tl.float64)
        value += tl.load(hidden.share + query, mask=there, other=0.0)[None, :] * product[:, None]
    place = query.to(tl.int64)[None, :] * target.size + row[:, None]
    tl.store(target.result + place, value.to(tl.float32), mask=row_there[:, None] & there[None, :])


def screen(hidden: torch.Tensor, placed: PlacedTier) -> Screened:
    """`kernels.screen.screen` of ``hidden`` [N, d] fp32, contiguous, on the device of ``placed``.

    Two launches, nothing is waited for, and values are not checked: NaN and infinity give finite
    estimates with an infinite slack.
    """
    rows, columns = hidden.shape
    device = placed.values.device
    size, width = len(placed.scale), padded_columns(placed.tier)
    common = placed.direction is not None

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    states = HiddenBytes(
        empty(torch.int8, 2 * rows, width),
        empty(torch.float64, rows),
        empty(torch.float64, rows),
        empty(torch.float64, rows, 2),
        rows,
        width,
    )
    hidden_kernel[(rows,)](
        hidden,
        placed.direction if common else hidden,
        placed.constants,
        states,
        columns,
        COMMON=common,
        num_warps=8,
        enable_fp_fusion=False,
    )
    products = placed.products if placed.products is not None else placed.scale
    target = Target(placed.scale, products, empty(torch.float32, rows, size), size)
    # The tensor cores want 16 columns at least.
    halves_at_a_time = min(max(triton.next_power_of_2(2 * rows), 16), 2 * LARGEST_HIDDEN_ROWS)
    # As many weight rows as leave the sums in registers. Every program reads all hidden bytes: of
    # many rows they are more than a small tile of weights is.
    many = halves_at_a_time > 64
    block = 256 if many else 128
    bytes_kernel[(triton.cdiv(size, block), triton.cdiv(2 * rows, halves_at_a_time))](
        placed.values,
        states,
        target,
        COMMON=common,
        ROWS=block,
        COLUMNS=halves_at_a_time,
        DEPTH=128,
        num_warps=8 if many else 4,
        num_stages=4,
        enable_fp_fusion=False,
    )
    return Screened(target.result, placed.row_slack, states.slack)
