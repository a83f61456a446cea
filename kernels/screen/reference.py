"""The screens, stated plainly: integers from the tier's meaning, one matrix product, one scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.quantize.layout import BLOCK, GROUP, SUMS, unpack_nibbles, unpack_signs
from lexshard.kernels.quantize.tiers import DitheredInt4Tier, Int4Tier, Int8Tier, OneBitTier, Tier
from lexshard.kernels.screen.hidden import QuantizedHidden


def integer_sums(
    hidden: QuantizedHidden, tier: Tier, *, fine: bool = False
) -> npt.NDArray[np.int64]:
    """What the kernels add up before any scale: [N, V]."""
    values = hidden.values.astype(np.int64)
    if isinstance(tier, Int8Tier):
        return values @ tier.values.astype(np.int64).T
    count, columns = values.shape
    if isinstance(tier, OneBitTier):
        rows = np.arange(len(tier.scale))
        signs = unpack_signs(tier.signs, rows).astype(np.int64)
        factors = tier.multipliers.transpose(0, 2, 1).reshape(-1, columns // BLOCK)[rows]
        return values @ (signs * np.repeat(factors.astype(np.int64), BLOCK, axis=1)).T
    natural = values.reshape(count, columns // BLOCK, 2, 2, 2, SUMS, 2)
    natural = natural.transpose(0, 1, 5, 2, 4, 3, 6).reshape(count, columns)
    nibbles = unpack_nibbles(
        tier.nibbles if isinstance(tier, DitheredInt4Tier) else tier.high
    ).astype(np.int64)
    if fine and isinstance(tier, Int4Tier):
        nibbles = 16 * nibbles + unpack_nibbles(tier.low)
    multipliers = tier.multipliers.astype(np.int64)
    # Two starts per group of 32 columns.
    starts = hidden.starts.astype(np.int64).reshape(count, columns // GROUP, 2).sum(axis=2)
    return natural @ (nibbles * np.repeat(multipliers, GROUP, axis=1)).T + starts @ multipliers.T


def _estimates(
    hidden: QuantizedHidden, tier: Tier, sums: npt.NDArray[np.int64], unit: float
) -> npt.NDArray[np.float32]:
    step = hidden.step[:, None] * unit
    result = sums.astype(np.float64) * (tier.scale.astype(np.float64)[None] * step)
    if isinstance(tier, OneBitTier):
        result = result + hidden.offset[:, None]
    if tier.common is not None:
        share = hidden.share[:, None]
        result = result + share * tier.common.products.astype(np.float64)[None]
    return result.astype(np.float32)


def screen(hidden: QuantizedHidden, tier: Tier) -> npt.NDArray[np.float32]:
    unit = 16.0 if isinstance(tier, Int4Tier) else 1.0
    return _estimates(hidden, tier, integer_sums(hidden, tier), unit)


def refine(
    hidden: QuantizedHidden,
    tier: Int4Tier,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    every = _estimates(hidden, tier, integer_sums(hidden, tier, fine=True), 1.0)
    return every[np.repeat(np.arange(len(every)), np.diff(offsets)), ids]
