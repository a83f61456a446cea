"""Hidden states as integers, in numba: `kernels.screen.types` says which.

Every row is worked on alone, by the same instructions whatever is beside it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

import lexshard.kernels.screen.vnni as vnni
from lexshard.kernels.copies import copy_into
from lexshard.kernels.ordered_sums import dot
from lexshard.kernels.quantize.layout import BLOCK, aligned
from lexshard.kernels.quantize.rotation import ROTATION_ERROR
from lexshard.kernels.quantize.tiers import COIN_UNIT, DitheredInt4Tier, Int8Tier, OneBitTier, Tier
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

# From this many hidden states on products cost more than reading the tier: bytes are cheaper.
EIGHT_BIT_ROWS = 5
# The most a hidden state may lose to 8 bits, per unit of its norm. The bound of an int8 tier has
# about 0.008 of its own; smooth hidden states lose as much, the demo's 0.006 to 0.034, those with
# large outliers far more. Up to here a looser bound costs less than products of 16 bits: of the
# demo's rows 2.6 tokens are rescored in place of 1.2, and 29 us of screening are 49 otherwise.
EIGHT_BIT_LOSS = 0.05

NO_FLOATS = np.empty(0, np.float32)
NO_COINS = np.empty(0, np.int16)
NO_MIXING = np.empty((0, 0))
NO_BLOCKS = np.empty((0, 0, 0), np.float32)


@njit(nogil=True, cache=True)
def _largest(values):  # type: ignore[no-untyped-def]
    """The largest magnitude; eight maxima side by side, as one would wait for itself."""
    peaks = np.zeros(8)
    for start in range(0, values.size - 7, 8):
        for lane in range(8):
            peaks[lane] = max(peaks[lane], abs(values[start + lane]))
    peak = 0.0
    for column in range(values.size - values.size % 8, values.size):
        peak = max(peak, abs(values[column]))
    for lane in range(8):
        peak = max(peak, peaks[lane])
    return peak


@njit(nogil=True, cache=True)
def _rotate(rest, signs, mixing, blocks, mixed):  # type: ignore[no-untyped-def]
    """Turns ``rest`` [D] in place; ``mixed`` [D] is working space."""
    count = mixing.shape[0]
    for column in range(rest.size):
        rest[column] *= signs[column]
    for block in range(count):
        target = mixed[block * BLOCK : (block + 1) * BLOCK]
        target[:] = 0.0
        for other in range(count):
            factor = mixing[block, other]
            source = rest[other * BLOCK : (other + 1) * BLOCK]
            for column in range(BLOCK):
                target[column] += factor * source[column]
    for block in range(count):
        target = rest[block * BLOCK : (block + 1) * BLOCK]
        source = mixed[block * BLOCK : (block + 1) * BLOCK]
        target[:] = 0.0
        for row in range(0, BLOCK, 4):
            a, b, c, d = source[row], source[row + 1], source[row + 2], source[row + 3]
            first, second = blocks[block, row], blocks[block, row + 1]
            third, fourth = blocks[block, row + 2], blocks[block, row + 3]
            for column in range(BLOCK):
                target[column] += (
                    first[column] * a + second[column] * b + third[column] * c + fourth[column] * d
                )


@njit(nogil=True, cache=True)
def _block_factor(turned):  # type: ignore[no-untyped-def]
    """The fourth root of the sum of ``||r_k||^4`` over blocks."""
    total = 0.0
    for start in range(0, turned.size, BLOCK):
        part = turned[start : start + BLOCK]
        square = dot(part, part)
        total += square * square
    return math.sqrt(math.sqrt(total))


@njit(nogil=True, cache=True)
def _arrange(integers, coins, nibbles, values, starts):  # type: ignore[no-untyped-def]
    """Integers [D] to int16 in the tier's order; for coins what their sums start from."""
    if not nibbles:
        for column in range(integers.size):
            values[column] = np.int16(integers[column])
        return
    for block in range(0, integers.size, BLOCK):
        for place in range(8):
            for step in range(8):
                column = block + 16 * place + 2 * step
                stored = (step & 4) + 2 * (step & 1) + (step >> 1 & 1)
                target = block + 16 * stored + 2 * place
                values[target] = np.int16(integers[column])
                values[target + 1] = np.int16(integers[column + 1])
    for begin in range(starts.size if coins.size else 0):
        total = 0.0
        for column in range(16 * begin, 16 * begin + 16):
            total += integers[column] * (np.float64(coins[column]) * COIN_UNIT)
        starts[begin] = -np.int32(np.rint(total))


@njit(nogil=True, cache=True)
def quantize(  # type: ignore[no-untyped-def]
    hidden,
    direction,
    coins,
    signs,
    mixing,
    blocks,
    centre,
    nibbles,
    largest,
    room,
    largest_size,
    values,
    starts,
    results,
):
    """Fills ``values``, ``starts`` and ``results`` [N, 6]: step, share, offset, two slacks and
    the loss, per unit of what was turned into integers.

    Returns whether all hidden states are finite.
    """
    columns = hidden.shape[1]
    rest = np.empty(values.shape[1])
    working = np.empty(values.shape[1])
    length = math.sqrt(dot(direction, direction))
    for query in range(hidden.shape[0]):
        state = hidden[query]
        size = math.sqrt(dot(state, state))
        if not math.isfinite(size):
            return False
        share = 0.0
        rest[columns:] = 0.0
        if direction.size:
            share = np.float64(np.float32(dot(state, direction) / (length * length)))
            for column in range(columns):
                rest[column] = state[column] - share * direction[column]
        else:
            copy_into(rest, state)
        along = abs(share) * length
        norm = math.sqrt(dot(rest, rest))
        usable = largest_size * (size + norm + along) < LARGEST_PRODUCT
        if not usable:
            share = 0.0
            rest[:] = 0.0
        factor, certain, offset = norm, 0.0, 0.0
        if signs.size:
            if direction.size:
                certain = abs(dot(rest[:columns], direction)) / length
            certain += (ROTATION_ERROR + ROUNDING) * norm
            certain += CENTRE_ROUNDING * (norm + along + size)
            offset = dot(rest[:columns], centre)
            _rotate(rest, signs, mixing, blocks, working)
            factor = _block_factor(rest) + ROTATION_ERROR * norm
        step = max(_largest(rest) / largest, norm * STEP_MARGIN / room)
        if not usable or step == 0.0:
            step = 1.0
        for column in range(rest.size):
            integer = np.rint(rest[column] / step)
            working[column] = integer
            rest[column] -= step * integer
        loss = math.sqrt(dot(rest, rest))
        reached = step * math.sqrt(dot(working, working))
        _arrange(working, coins, nibbles, values[query], starts[query])
        roundings = ROUNDING * (reached + 2.0 * along + size)
        scaled = loss * NORM_MARGIN + roundings + SMALLEST_LOSS
        results[query, 0] = step
        results[query, 1] = share
        results[query, 2] = offset
        results[query, 3] = factor * NORM_MARGIN
        results[query, 4] = scaled + certain if usable else np.inf
        results[query, 5] = loss / norm if norm > 0.0 else 0.0
    return True


def quantize_hidden(
    hidden: npt.NDArray[np.float32], tier: Tier, bits: HiddenBits | None = None
) -> QuantizedHidden:
    """`kernels.screen.reference.quantize_hidden`: its bounds, from sums in other orders.

    Without ``bits``, 8 where that is faster and loses little of any of the hidden states, else 16.
    Raises ValueError for NaN or infinity, or if the tier has no use for 8 bits.
    """
    pays = isinstance(tier, Int8Tier) and vnni.AVAILABLE and len(hidden) >= EIGHT_BIT_ROWS
    if bits is None and pays:
        quantized, loss = _quantized(hidden, tier, 8)
        if loss <= EIGHT_BIT_LOSS:
            return quantized
    return _quantized(hidden, tier, bits or 16)[0]


def _quantized(
    hidden: npt.NDArray[np.float32], tier: Tier, bits: HiddenBits
) -> tuple[QuantizedHidden, float]:
    """Also the largest loss of a hidden state, relative to it."""
    count, width = len(hidden), padded_columns(tier)
    nibbles = not isinstance(tier, Int8Tier | OneBitTier)
    values = aligned((count, width), np.int16)
    starts = np.zeros((count, width // 16 if nibbles else 0), np.int32)
    results = np.empty((count, 6))
    signs, mixing, blocks, centre = NO_FLOATS, NO_MIXING, NO_BLOCKS, NO_FLOATS
    if isinstance(tier, OneBitTier):
        signs, mixing, blocks = tier.rotation.signs, tier.rotation.mixing, tier.rotation.blocks
        centre = tier.centre
    finite = quantize(
        np.ascontiguousarray(hidden),
        NO_FLOATS if tier.common is None else tier.common.vector,
        tier.coins if isinstance(tier, DitheredInt4Tier) else NO_COINS,
        signs,
        mixing,
        blocks,
        centre,
        nibbles,
        np.float64(largest_integer(tier, bits)),
        tier.hidden_limit - math.sqrt(width) / 2.0 - 1.0,
        tier.largest_size,
        values,
        starts,
        results,
    )
    if not finite:
        raise ValueError("hidden states contain NaN or infinity: nothing can be screened")
    step, share, offset = (np.ascontiguousarray(results[:, column]) for column in range(3))
    if bits == 8:
        values = values.astype(np.int8)
    quantized = QuantizedHidden(values, starts, step, share, offset, results[:, 3:5])
    return quantized, float(results[:, 5].max(initial=0.0))
