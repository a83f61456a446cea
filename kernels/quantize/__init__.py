"""From output weights to the low-precision tiers that screens read."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.quantize.layout import BLOCK, GROUP, LINE, aligned, pack_nibbles, padded
from lexshard.kernels.quantize.one_bit import quantize_one_bit
from lexshard.kernels.quantize.rounding import (
    SMALLEST_SIZE,
    in_row_blocks,
    norms,
    round_up,
    row_blocks,
)
from lexshard.kernels.quantize.tiers import (
    COIN_UNIT,
    CommonDirection,
    DitheredInt4Tier,
    Int4Tier,
    Int8Tier,
    OneBitTier,
    Tier,
)

Kind = Literal["int8", "int4", "int4-dither", "1-bit"]

__all__ = [
    "CommonDirection",
    "DitheredInt4Tier",
    "Int4Tier",
    "Int8Tier",
    "Kind",
    "OneBitTier",
    "Tier",
    "quantize",
]

LARGEST_INT8 = 127
LARGEST_BOTH_NIBBLES = 119  # 16 * 7 + 7: the high nibble then rounds to at most 7
LARGEST_DITHERED = 7  # a coin below one half cannot round beyond it
LARGEST_MULTIPLIER = 255
LARGEST_HIDDEN = 2.0**15  # int16
LARGEST_SUM = 2.0**31 * (1.0 - 1e-6)
FAILURE_PROBABILITY = 1e-12


@overload
def quantize(
    weight: torch.Tensor,
    kind: Literal["int8"],
    *,
    direction: npt.NDArray[np.float32] | None = None,
    seed: int = 0,
) -> Int8Tier: ...


@overload
def quantize(
    weight: torch.Tensor,
    kind: Kind,
    *,
    direction: npt.NDArray[np.float32] | None = None,
    seed: int = 0,
) -> Tier: ...


def quantize(
    weight: torch.Tensor,
    kind: Kind,
    *,
    direction: npt.NDArray[np.float32] | None = None,
    seed: int = 0,
) -> Tier:
    """The tier of ``weight`` [V, d], fp32 or bf16 on the CPU, with per-row error bounds.

    - ``int8``: one scale per row, error norm ``e_i >= ||W_i - What_i||``.
    - ``int4``: groups of 32 with a high and a low nibble per weight, an error norm for the high
      plane and one for both.
    - ``int4-dither``: groups of 32 rounded with coins drawn from ``seed``. With steps ``Delta_ij``
      Hoeffding bounds ``|<W_i - What_i, h>|`` by ``sqrt(ln(2 / delta) / 2 sum_j Delta_ij^2 h_j^2)``
      with probability at least ``1 - delta``; here ``delta`` is 1e-12, the largest step of a row
      stands for all of them, and where ``||W_i - What_i||`` is smaller it is used instead.
    - ``1-bit``: the signs of randomly rotated rows (the rotation is drawn from ``seed``), with a
      bound that holds with probability at least ``1 - 1e-12``; see docs/index-file.md.

    ``direction`` [d] is a direction common to all hidden states, for example their mean: its
    products with the rows are kept in fp32, and only what is left of a hidden state meets the
    error norm; one whose products fp32 does not hold is left out. Rows are worked on a few hundred
    at a time in float64, and the result depends on the arguments alone. Raises ValueError for
    weights with NaN or infinity and shapes that do not fit.
    """
    if weight.ndim != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weight [V, d] in fp32 or bf16 expected, got {weight.dtype}")
    common = None if direction is None else _common_direction(weight, direction)
    if kind == "int8":
        return _quantize_int8(weight, common)
    if kind == "int4":
        return _quantize_int4(weight, common)
    if kind == "1-bit":
        return quantize_one_bit(weight, common, seed, LARGEST_SUM)
    return _quantize_dithered(weight, common, seed)


def _common_direction(
    weight: torch.Tensor, direction: npt.NDArray[np.float32]
) -> CommonDirection | None:
    """None where fp32 has no products as exact as `kernels.screen` counts on: with a vector that is
    hardly there they are rounded like numbers above zero that fp32 has few of, or they overflow."""
    vector = np.ascontiguousarray(direction, np.float32)
    if vector.shape != (weight.shape[1],) or not np.isfinite(vector).all() or not vector.any():
        raise ValueError(
            f"a common direction has {weight.shape[1]} finite values, not all zero; got shape "
            f"{vector.shape}"
        )
    wide = vector.astype(np.float64)
    products = in_row_blocks(weight, len(vector), lambda _, rows: rows @ wide)
    with np.errstate(over="ignore"):
        rounded = np.concatenate(products).astype(np.float32)
    is_exact = norms(wide[None])[0] >= SMALLEST_SIZE and np.isfinite(rounded).all()
    return CommonDirection(vector, rounded) if is_exact else None


def _ratio(values: npt.NDArray[np.float64], steps: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``values / steps``, 0 where the step is 0 (rows or groups too small for any step)."""
    steps = np.broadcast_to(steps, values.shape)
    return np.divide(values, steps, out=np.zeros_like(values), where=steps > 0)


def _size(
    rows: npt.NDArray[np.float64], *approximations: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``max(||W_i||, ||What_i||, ...)``, at least the smallest size."""
    largest = np.maximum(norms(rows), SMALLEST_SIZE)
    for approximation in approximations:
        largest = np.maximum(largest, norms(approximation))
    return largest


def _quantize_int8(weight: torch.Tensor, common: CommonDirection | None) -> Int8Tier:
    vocabulary, columns = weight.shape
    values = aligned((vocabulary, padded(columns, LINE)), np.int8)
    scale = np.empty(vocabulary, np.float32)
    slack = np.empty((2, vocabulary), np.float32)

    def work(place: slice, rows: npt.NDArray[np.float64]) -> float:
        # Rounded up, so that no weight exceeds 127 steps.
        scale[place] = round_up(np.abs(rows).max(axis=1) / LARGEST_INT8)
        steps = scale[place, None].astype(np.float64)
        integers = np.rint(_ratio(rows, steps))
        approximation = integers * steps
        values[place] = integers
        slack[0, place] = round_up(norms(rows - approximation))
        slack[1, place] = round_up(_size(rows, approximation))
        return float(norms(integers).max())

    largest = max(1.0, *in_row_blocks(weight, values.shape[1], work))
    return Int8Tier(
        values, scale, slack, float(slack[1].max()), LARGEST_SUM / largest, columns, common
    )


def _group_steps(
    rows: npt.NDArray[np.float64], largest_integer: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """The scale of every row and the multipliers of its groups [R, D / 32].

    A multiplier is rounded up, so that no weight exceeds ``largest_integer`` steps.
    """
    peaks = np.abs(rows).reshape(len(rows), -1, GROUP).max(axis=2)
    scale = round_up(peaks.max(axis=1) / (largest_integer * LARGEST_MULTIPLIER) * (1.0 + 1e-12))
    wanted = _ratio(peaks, scale[:, None].astype(np.float64)) / largest_integer
    return scale, np.ceil(wanted)


def _quantize_int4(weight: torch.Tensor, common: CommonDirection | None) -> Int4Tier:
    vocabulary, columns = weight.shape
    width = padded(columns, BLOCK)
    high = aligned((vocabulary, width // 2), np.uint8)
    low = aligned((vocabulary, width // 2), np.uint8)
    multipliers = np.empty((vocabulary, width // GROUP), np.uint8)
    scale = np.empty(vocabulary, np.float32)
    slack = np.empty((2, vocabulary), np.float32)
    fine_slack = np.empty((2, vocabulary), np.float32)

    def work(place: slice, rows: npt.NDArray[np.float64]) -> float:
        scale[place], group = _group_steps(rows, LARGEST_BOTH_NIBBLES)
        multipliers[place] = group
        wide = np.repeat(group, GROUP, axis=1)
        steps = wide * scale[place, None].astype(np.float64)
        integers = np.rint(_ratio(rows, steps))
        upper = np.floor((integers + 8.0) / 16.0)
        lower = integers - 16.0 * upper
        high[place], low[place] = pack_nibbles(upper), pack_nibbles(lower)
        coarse, fine = 16.0 * upper * steps, integers * steps
        slack[0, place] = round_up(norms(rows - coarse))
        fine_slack[0, place] = round_up(norms(rows - fine))
        slack[1, place] = fine_slack[1, place] = round_up(_size(rows, coarse, fine))
        return float(max(norms(wide * upper).max(), norms(wide * lower).max()))

    largest = max(1.0, *in_row_blocks(weight, width, work))
    return Int4Tier(
        high,
        low,
        multipliers,
        scale,
        slack,
        fine_slack,
        float(slack[1].max()),
        LARGEST_SUM / largest,
        columns,
        common,
    )


def _quantize_dithered(
    weight: torch.Tensor, common: CommonDirection | None, seed: int
) -> DitheredInt4Tier:
    vocabulary, columns = weight.shape
    width = padded(columns, BLOCK)
    nibbles = aligned((vocabulary, width // 2), np.uint8)
    multipliers = np.empty((vocabulary, width // GROUP), np.uint8)
    scale = np.empty(vocabulary, np.float32)
    slack = np.empty((2, vocabulary), np.float32)
    words = np.random.Generator(np.random.Philox(key=seed)).integers(0, 2**15, width)
    coins = (2 * words + 1 - 2**15).astype(np.int16)
    largest, most_steps = 1.0, 0.0
    # Coins are 2**-15 steps apart: an error's mean is within half of that of zero, per column.
    deviation = math.sqrt(math.log(2.0 / FAILURE_PROBABILITY) / 2.0)
    deviation = (deviation + math.sqrt(columns) * COIN_UNIT) * (1.0 + 1e-12)
    rounding = np.empty(vocabulary)
    for first, rows in row_blocks(weight, width):
        place = slice(first, first + len(rows))
        scale[place], group = _group_steps(rows, LARGEST_DITHERED)
        multipliers[place] = group
        wide = np.repeat(group, GROUP, axis=1)
        steps = wide * scale[place, None].astype(np.float64)
        integers = np.rint(_ratio(rows, steps) + coins * COIN_UNIT)
        nibbles[place] = pack_nibbles(integers)
        meaning = wide * (integers - coins * COIN_UNIT)
        approximation = meaning * scale[place, None].astype(np.float64)
        error = norms((rows - approximation)[:, :columns])
        error = np.minimum(error, deviation * steps.max(axis=1))
        rounding[place] = group.sum(axis=1) * scale[place]
        slack[0, place] = round_up(error)
        slack[1, place] = round_up(_size(rows, approximation))
        largest = max(largest, norms(meaning).max())
        most_steps = max(most_steps, float(group.sum(axis=1).max()))
    limit = (LARGEST_SUM - most_steps) / largest
    # The screen rounds the coins' share of each of two sums per group to an integer: at most half
    # a hidden step per sum, and a hidden step is below ``||h|| / min(limit / 2, 2**15 - 1)``.
    slack[0] = round_up(slack[0] + rounding / min(limit / 2.0, LARGEST_HIDDEN - 1.0))
    return DitheredInt4Tier(
        nibbles,
        multipliers,
        scale,
        coins,
        FAILURE_PROBABILITY,
        slack,
        float(slack[1].max()),
        limit,
        columns,
        common,
    )
