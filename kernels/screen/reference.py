"""The screens, stated plainly: integers from the tier's meaning, one matrix product, one scale."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.quantize.layout import BLOCK, GROUP, SUMS, unpack_nibbles, unpack_signs
from lexshard.kernels.quantize.rotation import ROTATION_ERROR, rotate
from lexshard.kernels.quantize.tiers import (
    COIN_UNIT,
    DitheredInt4Tier,
    Int4Tier,
    Int8Tier,
    OneBitTier,
    Tier,
)
from lexshard.kernels.screen.types import (
    CENTRE_ROUNDING,
    LARGEST_PRODUCT,
    NORM_MARGIN,
    ROUNDING,
    SMALLEST_LOSS,
    STEP_MARGIN,
    HiddenBits,
    QuantizedHidden,
    largest_integer,
    padded_columns,
)


def quantize_hidden(
    hidden: npt.NDArray[np.float32], tier: Tier, bits: HiddenBits | None
) -> QuantizedHidden:
    """``hidden`` [N, d] in the integers that ``tier`` multiplies.

    ``|estimate - canonical| <= hidden_slack @ row_slack``:

    - ``||r||``, or in a 1-bit tier the fourth root of the sum of ``||r_k||^4`` over turned blocks,
      meets the row's error bound;
    - the row's size meets ``||r - step values||``, one fp32 rounding each of the estimate, of the
      kept product with the common direction and of the canonical logit, and float64 roundings. In
      a 1-bit tier it also meets the error of turning ``r``, and what ``r`` still has along the
      common direction, which the rows have not.

    Raises ValueError for NaN and infinity.
    """
    if not np.isfinite(hidden).all():
        raise ValueError("hidden states contain NaN or infinity: nothing can be screened")
    rest = hidden.astype(np.float64)
    size = np.linalg.norm(rest, axis=1)
    share, along, leftover, certain, offset = np.zeros((5, len(hidden)))
    if tier.common is not None:
        wide = tier.common.vector.astype(np.float64)
        length = np.linalg.norm(wide)
        share = (rest @ wide / (length * length)).astype(np.float32).astype(np.float64)
        rest = rest - share[:, None] * wide
        along, leftover = np.abs(share) * length, np.abs(rest @ wide) / length
    factor = norm = np.linalg.norm(rest, axis=1)
    usable = tier.largest_size * (size + norm + along) < LARGEST_PRODUCT
    share, rest = np.where(usable, share, 0.0), np.where(usable[:, None], rest, 0.0)
    if isinstance(tier, OneBitTier):
        offset = rest @ tier.centre.astype(np.float64)
        rest = rotate(rest, tier.rotation, tier.rotation.blocks.astype(np.float64))
        squares = np.square(rest).reshape(len(rest), -1, BLOCK).sum(axis=2)
        factor = np.sqrt(np.linalg.norm(squares, axis=1)) + ROTATION_ERROR * norm
        certain = (ROTATION_ERROR + ROUNDING) * norm + leftover
        certain += CENTRE_ROUNDING * (norm + along + size)
    columns = padded_columns(tier)
    room = tier.hidden_limit - math.sqrt(columns) / 2.0 - 1.0  # rounding adds a half per column
    peak = np.abs(rest).max(axis=1, initial=0.0)
    step = np.maximum(peak / largest_integer(tier, bits or 16), norm * STEP_MARGIN / room)
    step = np.where(usable & (step > 0), step, 1.0)
    integers = np.rint(rest / step[:, None])
    approximation = step[:, None] * integers
    loss = np.linalg.norm(rest - approximation, axis=1)
    reached = np.linalg.norm(approximation, axis=1)
    scaled = loss * NORM_MARGIN + ROUNDING * (reached + 2.0 * along + size) + SMALLEST_LOSS
    slack = np.stack([factor * NORM_MARGIN, np.where(usable, scaled + certain, np.inf)], axis=1)
    integers = np.pad(integers, ((0, 0), (0, columns - integers.shape[1])))
    values, starts = _arrange(integers, tier)
    values = values.astype(np.int8 if bits == 8 else np.int16)
    return QuantizedHidden(values, starts, step, share, offset, slack)


def _arrange(
    integers: npt.NDArray[np.float64], tier: Tier
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """The integers [N, D] in the tier's order, and what sums start from."""
    count, columns = integers.shape
    if isinstance(tier, Int8Tier | OneBitTier):
        return integers, np.zeros((count, 0), np.int32)
    # A step is (half of a block, 16 bytes of 32, nibble); the order is half, nibble, bytes.
    values = integers.reshape(count, columns // BLOCK, SUMS, 2, 2, 2, 2)
    values = values.transpose(0, 1, 3, 5, 4, 2, 6).reshape(count, columns)
    starts = np.zeros((count, columns // 16))
    if isinstance(tier, DitheredInt4Tier):
        shares = integers * (tier.coins * COIN_UNIT)
        starts = -np.rint(shares.reshape(count, -1, 16).sum(axis=2))
    return values, starts.astype(np.int32)


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
