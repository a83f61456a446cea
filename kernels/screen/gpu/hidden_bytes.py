"""Hidden states as bytes on a device: what the tensor cores multiply, in one launch.

The arithmetic is that of `kernels.screen.hidden`; the integers of a hidden state may differ from
the host's in the last place (its step is a little larger), and with them estimates, within the same
bound.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.quantize.tiers import COIN_UNIT
from lexshard.kernels.screen.hidden import (
    LARGEST_PRODUCT,
    NORM_MARGIN,
    ROUNDING,
    SMALLEST_LOSS,
    STEP_MARGIN,
)

LARGEST_INTEGER = 32512.0  # 256 * 127: the high byte of every hidden integer fits
# A tier with coins assumes a step of at most ``||h|| / 32767`` for what rounding the coins' share
# costs, as a part of its error norm.
COIN_FACTOR = 32767.0 / LARGEST_INTEGER * STEP_MARGIN

_CHUNK = tl.constexpr(2048)
_LARGEST_INTEGER = tl.constexpr(LARGEST_INTEGER)
_LARGEST_PRODUCT = tl.constexpr(LARGEST_PRODUCT)
_ROUNDING = tl.constexpr(ROUNDING)
_COIN_UNIT = tl.constexpr(COIN_UNIT)
_COIN_FACTOR = tl.constexpr(COIN_FACTOR)
_SMALLEST_LOSS = tl.constexpr(SMALLEST_LOSS)
_NORM_MARGIN = tl.constexpr(NORM_MARGIN)
_STEP_MARGIN = tl.constexpr(STEP_MARGIN)


@triton.jit
def hidden_kernel(  # type: ignore[no-untyped-def]
    hidden,
    direction,
    coins,
    constants,
    halves,
    starts,
    step,
    share,
    slack,
    columns,
    width,
    rows,
    COMMON: tl.constexpr,
    COINS: tl.constexpr,
):
    """One hidden state: its bytes, step and share, and the slack of all that (`quantize_hidden`).

    Rows ``2 n`` and ``2 n + 1`` of ``halves`` [2 N, width] are the low and high bytes of state
    ``n``; ``starts`` [width / 32, 2 N] is what sums of groups start from.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _CHUNK)
    room = tl.load(constants)
    largest_size = tl.load(constants + 1)
    length = tl.load(constants + 2)
    squares = tl.zeros((_CHUNK,), tl.float64)
    dots = tl.zeros((_CHUNK,), tl.float64)
    for start in range(0, columns, _CHUNK):
        place = start + lane
        value = tl.load(hidden + row * columns + place, mask=place < columns, other=0.0)
        value = value.to(tl.float64)
        squares += value * value
        if COMMON:
            wide = tl.load(direction + place, mask=place < columns, other=0.0).to(tl.float64)
            dots += value * wide
    size = tl.sqrt(tl.sum(squares, 0))
    amount = tl.sum(dots, 0)
    if COMMON:
        amount = (amount / (length * length)).to(tl.float32).to(tl.float64)
    along = tl.abs(amount) * length
    squares = tl.zeros((_CHUNK,), tl.float64)
    peaks = tl.zeros((_CHUNK,), tl.float64)
    for start in range(0, columns, _CHUNK):
        place = start + lane
        value = tl.load(hidden + row * columns + place, mask=place < columns, other=0.0)
        rest = value.to(tl.float64)
        if COMMON:
            wide = tl.load(direction + place, mask=place < columns, other=0.0).to(tl.float64)
            rest -= amount * wide
        squares += rest * rest
        peaks = tl.maximum(peaks, tl.abs(rest))
    norm = tl.sqrt(tl.sum(squares, 0))
    usable = largest_size * (size + norm + along) < _LARGEST_PRODUCT
    unit = tl.maximum(tl.max(peaks, 0) / _LARGEST_INTEGER, norm * _STEP_MARGIN / room)
    unit = tl.where(usable & (unit > 0.0), unit, 1.0)
    amount = tl.where(usable, amount, 0.0)
    losses = tl.zeros((_CHUNK,), tl.float64)
    reaches = tl.zeros((_CHUNK,), tl.float64)
    for start in range(0, width, _CHUNK):
        place = start + lane
        inside = place < columns
        value = tl.load(hidden + row * columns + place, mask=inside, other=0.0)
        rest = value.to(tl.float64)
        if COMMON:
            wide = tl.load(direction + place, mask=inside, other=0.0).to(tl.float64)
            rest -= amount * wide
        rest = tl.where(inside, tl.where(usable, rest, 0.0), 0.0)
        whole = tl.floor(rest / unit + 0.5)
        losses += (rest - unit * whole) * (rest - unit * whole)
        reaches += unit * whole * (unit * whole)
        integer = whole.to(tl.int32)
        high = (integer + 128) >> 8
        low = integer - (high << 8)
        stored = place < width
        tl.store(halves + 2 * row * width + place, low.to(tl.int8), mask=stored)
        tl.store(halves + (2 * row + 1) * width + place, high.to(tl.int8), mask=stored)
        if COINS:
            coin = tl.load(coins + place, mask=stored, other=0).to(tl.int64)
            shares = tl.sum(tl.reshape(integer.to(tl.int64) * coin, (_CHUNK // 16, 16)), 1)
            begins = tl.floor(shares.to(tl.float64) * _COIN_UNIT + 0.5).to(tl.int32)
            begins = -tl.sum(tl.reshape(begins, (_CHUNK // 32, 2)), 1)
            group = start // 32 + tl.arange(0, _CHUNK // 32)
            begin = starts + group * (2 * rows) + 2 * row
            tl.store(begin, begins, mask=group * 32 < width)
            tl.store(begin + 1, tl.zeros_like(begins), mask=group * 32 < width)
    loss = tl.sqrt(tl.sum(losses, 0))
    reached = tl.sqrt(tl.sum(reaches, 0))
    scaled = loss * _NORM_MARGIN + _ROUNDING * (reached + 2.0 * along + size) + _SMALLEST_LOSS
    error = norm * _NORM_MARGIN
    if COINS:
        error *= _COIN_FACTOR
    tl.store(slack + 2 * row, error)
    tl.store(slack + 2 * row + 1, tl.where(usable, scaled, float("inf")))
    tl.store(step + row, unit)
    tl.store(share + row, amount)
