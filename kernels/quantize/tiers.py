"""The screening tiers: what is stored of the output weights in low precision, and what it means.

Every tier has, for weights ``W`` [V, d]:

- a meaning ``What_i`` in float64 (`dequantise`), of which a screen computes ``<What_i, h>``;
- ``row_slack`` [2, V] fp32, rounded up: how far ``<W_i, r>`` can be from ``<What_i, r>`` per unit
  of ``||r||``, and ``max(||W_i||, ||What_i||)``, which scales every rounding of the screen;
- ``largest_size``, the largest entry of the latter;
- ``hidden_limit``: integer hidden states with a Euclidean norm up to it keep every sum of integer
  products inside 32 bits;
- ``common`` (optional): a direction whose products with all rows are kept separately, so that
  only the rest of a hidden state meets the error norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.kernels.quantize.layout import BLOCK, GROUP, unpack_nibbles, unpack_signs
from lexshard.kernels.quantize.rotation import Rotation, rotate_back

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Int16s = npt.NDArray[np.int16]

# A coin is a multiple of 1 / 65,536: one of 32,768 equally spaced values inside (-1/2, 1/2).
COIN_UNIT = 2.0**-16


@dataclass(frozen=True, slots=True, eq=False)
class CommonDirection:
    """``products_i = fp32(<W_i, vector>)``, summed in float64."""

    vector: Float32s  # [d], any length above zero
    products: Float32s  # [V]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Tier:
    """One scale per row: ``What_ij = scale_i values_ij``."""

    values: npt.NDArray[np.int8]  # [V, D], D = d rounded up to 64, zero-padded
    scale: Float32s  # [V]
    row_slack: Float32s  # [2, V]
    largest_size: float
    hidden_limit: float
    columns: int  # d
    common: CommonDirection | None

    def dequantise(self, rows: npt.NDArray[np.int64]) -> Float64s:
        """``What`` of ``rows`` [R]: [R, d]."""
        values = self.values[rows, : self.columns].astype(np.float64)
        return values * self.scale[rows, None].astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Tier:
    """Groups of 32 columns; a high nibble to screen with and a low one to refine with.

    ``What_ij = 16 scale_i multipliers_ig high_ij``, and with the low plane
    ``scale_i multipliers_ig (16 high_ij + low_ij)``, where ``j`` lies in group ``g``. The scale of
    a group is an integer times the scale of its row, so that a screen stays in integers.
    """

    high: Bytes  # [V, D / 2], D = d rounded up to 128, in the order of `kernels.quantize.layout`
    low: Bytes  # [V, D / 2]
    multipliers: Bytes  # [V, D / 32]
    scale: Float32s  # [V]
    row_slack: Float32s  # [2, V] of the high plane alone
    fine_row_slack: Float32s  # [2, V] of both planes
    largest_size: float
    hidden_limit: float
    columns: int
    common: CommonDirection | None

    def dequantise(self, rows: npt.NDArray[np.int64], *, fine: bool = False) -> Float64s:
        """``What`` of ``rows`` [R], with the low plane where ``fine``: [R, d]."""
        values = 16.0 * unpack_nibbles(self.high[rows]).astype(np.float64)
        if fine:
            values += unpack_nibbles(self.low[rows])
        return _scaled(values, self.multipliers[rows], self.scale[rows])[:, : self.columns]


@dataclass(frozen=True, slots=True, eq=False)
class DitheredInt4Tier:
    """Groups of 32 columns, rounded after adding a random coin that is subtracted again.

    ``What_ij = scale_i multipliers_ig (nibbles_ij - coins_j / 65536)``. The coins make the error
    of every weight uniform and independent of the weight, so Hoeffding's inequality bounds
    ``<W_i - What_i, h>`` for every ``h`` that does not depend on the coins. They depend on the seed
    alone and are the same for all rows: what is stated holds per row with probability at least
    ``1 - failure_probability``, and a union over rows needs no independence between them.
    """

    nibbles: Bytes  # [V, D / 2], D = d rounded up to 128
    multipliers: Bytes  # [V, D / 32]
    scale: Float32s  # [V]
    coins: Int16s  # [D], odd
    failure_probability: float
    row_slack: Float32s  # [2, V], the first probabilistic
    largest_size: float
    hidden_limit: float
    columns: int
    common: CommonDirection | None

    def dequantise(self, rows: npt.NDArray[np.int64]) -> Float64s:
        """``What`` of ``rows`` [R]: [R, d]."""
        values = unpack_nibbles(self.nibbles[rows]) - self.coins * COIN_UNIT
        return _scaled(values, self.multipliers[rows], self.scale[rows])[:, : self.columns]


@dataclass(frozen=True, slots=True, eq=False)
class OneBitTier:
    """The signs of randomly rotated rows, with a scale per 128 of them.

    With ``R`` the rotation, ``What_i = centre + R^T (scale_i multipliers_ik signs_ij)``, where
    ``j`` lies in block ``k``. docs/index-file.md derives the bound: it is probabilistic,
    over the draw of the rotation, and holds for every row and every hidden state that does not
    depend on the rotation with probability at least ``1 - failure_probability``.

    Unlike in the other tiers, ``row_slack[0]`` meets the fourth root of ``sum_k ||r_k||^4`` over
    the blocks of the rotated hidden state, and sizes are those of all vectors that occur.
    """

    signs: Bytes  # [ceil(V / 64), D / 8, 64], D = d rounded up to 128: see `layout.pack_signs`
    multipliers: Bytes  # [ceil(V / 64), D / 128, 64]
    scale: Float32s  # [V]
    rotation: Rotation
    centre: Float32s  # [d]
    failure_probability: float
    row_slack: Float32s  # [2, V], the first probabilistic
    largest_size: float
    hidden_limit: float
    columns: int
    common: CommonDirection | None

    def dequantise(self, rows: npt.NDArray[np.int64]) -> Float64s:
        """``What`` of ``rows`` [R]: [R, d]."""
        values = unpack_signs(self.signs, rows).astype(np.float64)
        panel, place = np.divmod(rows, self.multipliers.shape[2])
        steps = self.multipliers[panel, :, place] * self.scale[rows, None].astype(np.float64)
        values *= np.repeat(steps, BLOCK, axis=1)
        return rotate_back(values, self.rotation, self.columns) + self.centre


Tier = Int8Tier | Int4Tier | DitheredInt4Tier | OneBitTier


def _scaled(values: Float64s, multipliers: Bytes, scale: Float32s) -> Float64s:
    steps = multipliers.astype(np.float64) * scale[:, None].astype(np.float64)  # [R, D / 32]
    return values * np.repeat(steps, GROUP, axis=1)
