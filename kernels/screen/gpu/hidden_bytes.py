"""Hidden states as bytes on a device: what the tensor cores multiply, in one launch.

The arithmetic is that of `kernels.screen.types`; the integers of a hidden state may differ from
the host's in the last place (its step is a little larger), and with them estimates, within the same
bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lexshard.kernels.screen.types import (
    LARGEST_PRODUCT,
    NORM_MARGIN,
    ROUNDING,
    SMALLEST_LOSS,
    STEP_MARGIN,
)

_CHUNK = tl.constexpr(2048)
_LARGEST_INTEGER = tl.constexpr(32512.0)  # 256 * 127: the high byte of every integer fits
_LARGEST_PRODUCT = tl.constexpr(LARGEST_PRODUCT)
_ROUNDING = tl.constexpr(ROUNDING)
_SMALLEST_LOSS = tl.constexpr(SMALLEST_LOSS)
_NORM_MARGIN = tl.constexpr(NORM_MARGIN)
_STEP_MARGIN = tl.constexpr(STEP_MARGIN)


class HiddenBytes(NamedTuple):
    """N hidden states as `kernels.screen.types` makes them integers. Rows ``2 n`` and ``2 n + 1``
    of ``halves`` are the low and high bytes of state ``n``."""

    halves: torch.Tensor  # [2 N, width] int8
    step: torch.Tensor  # [N] float64
    share: torch.Tensor  # [N] float64, how much of the common direction
    slack: torch.Tensor  # [N, 2] float64
    rows: int  # N
    width: int


@triton.jit
def _rest(hidden, direction, row, place, columns, amount, COMMON: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a hidden state has beside ``amount`` times the common direction, float64."""
    inside = place < columns
    rest = tl.load(hidden + row * columns + place, mask=inside, other=0.0).to(tl.float64)
    if COMMON:
        rest -= amount * tl.load(direction + place, mask=inside, other=0.0).to(tl.float64)
    return rest


@triton.jit
def hidden_kernel(hidden, direction, constants, result, columns, COMMON: tl.constexpr):  # type: ignore[no-untyped-def]
    """One hidden state: its bytes, step and share, and the slack of all that."""
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
        rest = _rest(hidden, direction, row, start + lane, columns, amount, COMMON)
        squares += rest * rest
        peaks = tl.maximum(peaks, tl.abs(rest))
    norm = tl.sqrt(tl.sum(squares, 0))
    usable = largest_size * (size + norm + along) < _LARGEST_PRODUCT
    unit = tl.maximum(tl.max(peaks, 0) / _LARGEST_INTEGER, norm * _STEP_MARGIN / room)
    unit = tl.where(usable & (unit > 0.0), unit, 1.0)
    amount = tl.where(usable, amount, 0.0)
    losses = tl.zeros((_CHUNK,), tl.float64)
    reaches = tl.zeros((_CHUNK,), tl.float64)
    halves = result.halves + 2 * row * result.width
    for start in range(0, result.width, _CHUNK):
        place = start + lane
        rest = _rest(hidden, direction, row, place, columns, amount, COMMON)
        rest = tl.where(usable, rest, 0.0)
        whole = tl.floor(rest / unit + 0.5)
        losses += (rest - unit * whole) * (rest - unit * whole)
        reaches += unit * whole * (unit * whole)
        integer = whole.to(tl.int32)
        high = (integer + 128) >> 8
        stored = place < result.width
        tl.store(halves + place, (integer - (high << 8)).to(tl.int8), mask=stored)
        tl.store(halves + result.width + place, high.to(tl.int8), mask=stored)
    loss = tl.sqrt(tl.sum(losses, 0))
    reached = tl.sqrt(tl.sum(reaches, 0))
    scaled = loss * _NORM_MARGIN + _ROUNDING * (reached + 2.0 * along + size) + _SMALLEST_LOSS
    tl.store(result.slack + 2 * row, norm * _NORM_MARGIN)
    tl.store(result.slack + 2 * row + 1, tl.where(usable, scaled, float("inf")))
    tl.store(result.step + row, unit)
    tl.store(result.share + row, amount)
