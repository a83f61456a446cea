"""The 1-bit tier: signs of randomly rotated rows, after RaBitQ (Gao and Long, 2024).

What is random is the rotation ``R`` of `kernels.quantize.rotation`, drawn from a seed. Weights and
hidden states must not depend on it; those of a model do not, and tokens do not either as long as
certified outputs equal the exact ones.

**The estimator.** A row without its centre and without what it has along the common direction is
``V_i``; turned, and cut into blocks of b = 128, it is ``v_k = (R V_i)_k``. The signs ``x_k`` and
the scale ``s_k = ||v_k||^2 / sum_j |v_kj|`` make ``s_k x_k - v_k`` orthogonal to ``v_k``; its
length is ``E_k = sqrt(s_k^2 b - ||v_k||^2)``. A hidden state ``r``, turned, is ``q_k = (R r)_k``.

**Its error.** For a fixed pair of row and hidden state let ``V_k`` and ``Q_k`` be the blocks
before their own random matrices ``B_k``: ``v_k = B_k V_k`` and ``q_k = B_k Q_k``. Split ``Q_k``
into a part along ``V_k`` and a rest ``P_k`` orthogonal to it. The first contributes ``<V_k, Q_k>``
exactly, as ``<s_k x_k, v_k> = ||v_k||^2``. Given ``v_k``, which alone decides ``x_k`` and ``s_k``,
the direction of ``B_k P_k`` is uniform on the unit sphere of the ``b - 1`` dimensions orthogonal
to ``v_k``, because ``B_k`` has the Haar distribution. So, with ``T_k`` a coordinate of a uniform
point of that sphere, independently for every block,

    sum_k <s_k x_k, q_k> - <V_i, r> = sum_k E_k ||P_k|| T_k.

It has mean zero, and variance ``sum_k E_k^2 ||P_k||^2 / (b - 1)``. The even moments of ``T_k`` are
``(2m - 1)!! / ((b - 1)(b + 1)...(b + 2m - 3))``, none above those of a Gaussian of variance
``1 / (b - 1)``, and the odd ones vanish; so ``E exp(l T_k) <= exp(l^2 / (2 (b - 1)))``. For the
sum Chernoff gives, with ``t = sqrt(2 ln(2 / delta))``,

    |error| <= t / sqrt(b - 1) * sqrt(sum_k E_k^2 ||q_k||^2)    with probability >= 1 - delta,

and by Cauchy and Schwarz the last root is at most ``(sum_k E_k^4)^(1/4) (sum_k ||q_k||^4)^(1/4)``:
a factor of the row times a factor of the hidden state. Where the mixing has spread both evenly
over the blocks, this is tight. ``delta`` is 1e-12: t = 7.53 standard deviations.

**What is stored differs a little**, in ways bounded without probability. ``s_k`` is rounded to
``scale_i`` times an integer up to 255; and where a turned weight is so near zero that rounding
could have changed its sign, the sign may not be the one the derivation means. If the stored block
differs from the ideal one by at most ``D_k``, this costs ``sum_k D_k ||q_k||``, by Hoelder at most
``(sum_k D_k^(4/3))^(3/4)`` times the same factor of the hidden state.
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
