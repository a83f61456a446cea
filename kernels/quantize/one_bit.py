"""The 1-bit tier: signs of randomly rotated rows, after RaBitQ (Gao and Long, 2024).

Blocks of 128 turned columns keep their signs and a scale. The bound that `error_bound` computes,
over the draw of the rotation, is derived in docs/index-file.md, whose names are used here.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.quantize.layout import BLOCK, pack_panels, pack_signs, padded
from lexshard.kernels.quantize.rotation import draw_rotation, rotate
from lexshard.kernels.quantize.rounding import SMALLEST_SIZE, norms, round_up, row_blocks
from lexshard.kernels.quantize.tiers import CommonDirection, OneBitTier

FAILURE_PROBABILITY = 1e-12
LARGEST_MULTIPLIER = 255
# Turned rows in float64 err by less than this, per unit of the row: 127 reflections make a block of
# the rotation, each in at most 128 additions and products per entry.
ROW_ERROR = 1e-10
# ``t / sqrt(b - 1)``
DEVIATION = math.sqrt(2.0 * math.log(2.0 / FAILURE_PROBABILITY) / (BLOCK - 1))

Float64s = npt.NDArray[np.float64]


def block_scales(turned: Float64s) -> Float64s:
    """``s_k`` of ``turned`` rows [R, K, 128]: [R, K], 0 for blocks of zeros."""
    sums = np.abs(turned).sum(axis=2)
    squares = np.einsum("rkb,rkb->rk", turned, turned)
    return np.divide(squares, sums, out=np.zeros_like(sums), where=sums > 0)


def error_bound(turned: Float64s, wanted: Float64s, stored: Float64s, length: Float64s) -> Float64s:
    """What meets the hidden state's factor: [R].

    ``turned`` [R, K, 128] are rotated rows of norms at most ``length`` [R], ``wanted`` [R, K] their
    `block_scales` and ``stored`` [R, K] what the tier has instead.
    """
    squares = np.einsum("rkb,rkb->rk", turned, turned)
    # E_k^2, with the rounding of two sums of 128.
    ideal = np.maximum(BLOCK * np.square(wanted) - squares, 0.0) + 1e-13 * squares
    doubtful = (np.abs(turned) <= 4.0 * ROW_ERROR * length[:, None, None]).sum(axis=2)
    moved = math.sqrt(BLOCK) * np.abs(stored - wanted) + 2.0 * wanted * np.sqrt(doubtful)
    random = DEVIATION * np.sqrt(np.sqrt(np.square(ideal).sum(axis=1)))
    certain = np.power(np.power(moved, 4.0 / 3.0).sum(axis=1), 0.75)
    # ROW_ERROR moves s_k by up to 150 times itself where a block has one large weight only.
    return (random + certain) * (1.0 + 1e-9) + 1e3 * ROW_ERROR * length


def quantize_one_bit(
    weight: torch.Tensor, common: CommonDirection | None, seed: int, largest_sum: float
) -> OneBitTier:
    """The 1-bit tier of ``weight`` [V, d]; every sum of integers stays below ``largest_sum``.

    Raises ValueError for weights with NaN or infinity, or too large for a scale in fp32.
    """
    vocabulary, columns = weight.shape
    width = padded(columns, BLOCK)
    rotation, blocks = draw_rotation(columns, seed)
    centre = _mean_row(weight)
    far = centre.astype(np.float64)
    positive = np.empty((vocabulary, width), np.bool_)
    multipliers = np.empty((vocabulary, width // BLOCK), np.uint8)
    scale = np.empty(vocabulary, np.float32)
    slack = np.empty((2, vocabulary), np.float32)
    largest = 1.0
    for first, rows in row_blocks(weight, columns):
        place = slice(first, first + len(rows))
        rest = rows - far
        distance = norms(rest)
        if common is not None:
            along = common.vector.astype(np.float64)
            rest -= np.outer(rest @ along / (along @ along), along)
        turned = rotate(rest, rotation, blocks)
        positive[place] = turned > 0
        turned = turned.reshape(len(rows), -1, BLOCK)
        wanted = block_scales(turned)
        scale[place] = round_up(wanted.max(axis=1) / LARGEST_MULTIPLIER)
        if not np.isfinite(scale[place]).all():
            raise ValueError("the output weights are too large for scales in fp32")
        unit = scale[place, None].astype(np.float64)
        integers = np.rint(np.divide(wanted, unit, out=np.zeros_like(wanted), where=unit > 0))
        multipliers[place] = integers
        slack[0, place] = round_up(error_bound(turned, wanted, integers * unit, norms(rest)))
        reached = norms(integers * unit) * math.sqrt(BLOCK) * (1.0 + 1e-9)
        size = np.maximum(np.maximum(norms(rows), distance), reached)
        slack[1, place] = round_up(np.maximum(size, max(norms(far[None])[0], SMALLEST_SIZE)))
        largest = max(largest, math.sqrt(BLOCK) * norms(integers).max())
    return OneBitTier(
        pack_signs(positive),
        pack_panels(multipliers),
        scale,
        rotation,
        centre,
        FAILURE_PROBABILITY,
        slack,
        float(slack[1].max()),
        largest_sum / largest,
        columns,
        common,
    )


def _mean_row(weight: torch.Tensor) -> npt.NDArray[np.float32]:
    total = np.zeros(weight.shape[1])
    for _, rows in row_blocks(weight, weight.shape[1]):
        total = np.add.reduce(np.concatenate([total[None], rows]))  # row by row
    return (total / len(weight)).astype(np.float32)
