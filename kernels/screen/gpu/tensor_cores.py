"""The screens on the tensor cores: 8-bit integer products, exact in 32 bits, for any batch size.

A 16-bit hidden integer is ``256 high + low`` with two signed bytes, so a hidden row becomes two
rows of bytes and a screen an integer matrix product. Weights are read once for up to 64 hidden
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

from lexshard.kernels.quantize.layout import unpack_nibbles
from lexshard.kernels.quantize.tiers import Int4Tier, Int8Tier, Tier
from lexshard.kernels.screen.gpu.hidden_bytes import HiddenBytes, hidden_kernel
from lexshard.kernels.screen.types import Screened, padded_columns

LARGEST_HIDDEN_ROWS = 64  # of a program
ROW_BLOCK = 4096  # rows repacked at a time


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTier:
    """A tier whose arrays lie on a device, in the order the tensor cores take them.

    Of two groups of 32 columns, byte ``k`` holds column ``k`` of the first in its low nibble and
    column ``k`` of the second in its high one.
    """

    tier: Int8Tier | Int4Tier
    values: torch.Tensor  # [V, D] int8, or [V, D / 2] int8 of two nibbles
    multipliers: torch.Tensor | None  # [D / 32, V] uint8; None for int8
    scale: torch.Tensor  # [V] float64, what an integer of the screen stands for
    row_slack: torch.Tensor  # [2, V] fp32
    direction: torch.Tensor | None  # [d] fp32
    products: torch.Tensor | None  # [V] fp32
    constants: torch.Tensor  # [3] float64: room for hidden integers, largest size, ||direction||


def place(tier: Tier, device: torch.device | str) -> PlacedTier:
    """``tier`` on a device, for `screen`; of an int4 tier the high plane.

    Raises ValueError for tiers whose bounds are probabilistic.
    """
    if not isinstance(tier, Int8Tier | Int4Tier):
        raise ValueError(
            "1-bit and int4-dither are screened on a CPU alone: --tier int8 or int4 on a GPU"
        )
    scale = torch.from_numpy(tier.scale).to(device).double()
    multipliers = None
    if isinstance(tier, Int8Tier):
        values = torch.from_numpy(tier.values).to(device)
    else:
        values = _repack(tier.high, device)
        multipliers = torch.from_numpy(tier.multipliers).to(device).T.contiguous()
        scale = 16.0 * scale
    common = tier.common
    length = 1.0 if common is None else float(np.linalg.norm(common.vector.astype(np.float64)))
    room = float(tier.hidden_limit) - math.sqrt(padded_columns(tier)) / 2.0 - 1.0
    return PlacedTier(
        tier,
        values,
        multipliers,
        scale,
        torch.from_numpy(tier.row_slack).to(device),
        None if common is None else torch.from_numpy(common.vector).to(device),
        None if common is None else torch.from_numpy(common.products).to(device),
        torch.tensor([room, tier.largest_size, length], dtype=torch.float64, device=device),
    )


def _repack(nibbles: np.ndarray, device: torch.device | str) -> torch.Tensor:
    parts = []
    for start in range(0, len(nibbles), ROW_BLOCK):
        natural = torch.from_numpy(unpack_nibbles(nibbles[start : start + ROW_BLOCK])).to(device)
        pairs = natural.view(len(natural), -1, 2, 32)
        packed = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)
        parts.append(packed.reshape(len(natural), -1))
    return torch.cat(parts)


class Target(NamedTuple):
    """Where the estimates of V rows go, and what turns sums of integers into them."""

    scale: torch.Tensor  # [V] float64
    products: torch.Tensor  # [V] fp32, or anything without a common direction
    result: torch.Tensor  # [N, V] fp32
    size: int  # V


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    total,
    row,
    first,
    hidden,
    target,
    COMMON: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums [ROWS, 2 hidden rows] to estimates, as the CPU's screens scale them."""
    low, high = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    sums = low + high * 256
    query = first + tl.arange(0, COLUMNS // 2)
    inside = row < target.size
    present = query < hidden.rows
    unit = tl.load(target.scale + row, mask=inside, other=0.0)[:, None]
    unit = unit * tl.load(hidden.step + query, mask=present, other=0.0)[None, :]
    value = sums.to(tl.float64) * unit
    if COMMON:
        product = tl.load(target.products + row, mask=inside, other=0.0).to(tl.float64)
        value += tl.load(hidden.share + query, mask=present, other=0.0)[None, :] * product[:, None]
    place = query.to(tl.int64)[None, :] * target.size + row[:, None]
    tl.store(target.result + place, value.to(tl.float32), mask=inside[:, None] & present[None, :])


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
    inside = (row < target.size)[:, None]
    present = (half < 2 * hidden.rows)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, hidden.width, DEPTH):
        place = start + tl.arange(0, DEPTH)
        valid = place < hidden.width
        weights = tl.load(weight_rows + place[None, :], mask=inside & valid[None, :], other=0)
        words = tl.load(hidden_rows + place[:, None], mask=present & valid[:, None], other=0)
        total = tl.dot(weights, words, total, out_dtype=tl.int32)
    first = tl.program_id(1) * (COLUMNS // 2)
    _store(total, row, first, hidden, target, COMMON, ROWS, COLUMNS)


@triton.jit
def _low_nibbles(both, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 times the low nibbles, four bytes at a time where assembly can say so."""
    if ASSEMBLY:
        nibbles = tl.inline_asm_elementwise(
            "{ .reg .b32 up; shl.b32 up, $1, 4; and.b32 $0, up, 0xF0F0F0F0; }",
            "=r,r",
            [both],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        nibbles = both << 4
    return nibbles


@triton.jit
def _high_nibbles(both, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 times the high nibbles, likewise."""
    if ASSEMBLY:
        nibbles = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [both], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        nibbles = both & -16
    return nibbles


@triton.jit
def _group_sums(weights, factor, place, hidden_rows, present):  # type: ignore[no-untyped-def]
    """The products of one group of 32 columns, times the multipliers of its rows.

    ``weights`` are 16 times the nibbles.
    """
    words = tl.load(hidden_rows + place[:, None], mask=present[None, :], other=0)
    sums = tl.dot(weights, words, out_dtype=tl.int32) >> 4
    return sums * factor.to(tl.int32)[:, None]


@triton.jit
def nibbles_kernel(  # type: ignore[no-untyped-def]
    values,
    multipliers,
    hidden,
    target,
    COMMON: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS weight rows x COLUMNS rows of hidden bytes, two groups of columns at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight_rows = values + row.to(tl.int64)[:, None] * (hidden.width // 2)
    hidden_rows = hidden.halves + half.to(tl.int64)[None, :] * hidden.width
    inside = row < target.size
    present = half < 2 * hidden.rows
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for pair in range(hidden.width // 64):
        byte = pair * 32 + tl.arange(0, 32)
        both = tl.load(weight_rows + byte[None, :], mask=inside[:, None], other=0)
        factors = multipliers + 2 * pair * target.size + row
        columns = pair * 64 + tl.arange(0, 32)
        low = tl.load(factors, mask=inside, other=0)
        total += _group_sums(_low_nibbles(both, ASSEMBLY), low, columns, hidden_rows, present)
        high = tl.load(factors + target.size, mask=inside, other=0)
        total += _group_sums(
            _high_nibbles(both, ASSEMBLY), high, columns + 32, hidden_rows, present
        )
    first = tl.program_id(1) * (COLUMNS // 2)
    _store(total, row, first, hidden, target, COMMON, ROWS, COLUMNS)


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
    # As many weight rows as leave the sums in registers; nibbles need two tiles of them. Every
    # program reads all hidden bytes: of many rows they are more than a small tile of weights is.
    many = halves_at_a_time > (64 if placed.multipliers is None else 32)
    block = (256 if placed.multipliers is None else 64) if many else 128
    grid = (triton.cdiv(size, block), triton.cdiv(2 * rows, halves_at_a_time))
    if placed.multipliers is None:
        bytes_kernel[grid](
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
    else:
        nibbles_kernel[grid](
            placed.values,
            placed.multipliers,
            states,
            target,
            COMMON=common,
            # Triton's interpreter, which runs on a CPU, knows no assembly.
            ASSEMBLY=device.type != "cpu",
            ROWS=block,
            COLUMNS=halves_at_a_time,
            num_warps=4,
            num_stages=4,
            enable_fp_fusion=False,
        )
    return Screened(target.result, placed.row_slack, states.slack)
