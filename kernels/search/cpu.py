"""The search in numba: one pass for the maxima of blocks of 64 ids, then only blocks that matter.

For unadjusted rows a bound is ``estimate + shift`` with one shift per row, which commutes with
maxima; adjusted rows are written out once per step, with the adjustment applied to their bounds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from kernels.penalties.cpu import MINUS_INFINITY, adjust_row
from kernels.search.kinds import GREEDY, GUMBEL, TOP_K
from kernels.search.selection import key_value, kth_largest_key, order_key

if TYPE_CHECKING:
    from kernels.penalties import Adjustments
    from kernels.search import Needs

BLOCK = 64
# Above the rounding of any fp32 noise (at most 43), below anything that would open more blocks.
NOISE_ROUNDING = 1e-5


# The flags let the maxima vectorise; no value is NaN, and the sign of a zero does not matter.
@njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})
def block_maxima(values, size, maxima):  # type: ignore[no-untyped-def]
    """Fills ``maxima`` with the largest value of every 64 and returns the largest magnitude."""
    highest_of_all = values[0]
    lowest_of_all = values[0]
    for block in range(maxima.size):
        start = block * BLOCK
        # A constant length lets the compiler unroll the whole blocks.
        length = BLOCK if start + BLOCK <= size else size - start
        highest = values[start]
        lowest = values[start]
        if length == BLOCK:
            for offset in range(BLOCK):
                value = values[start + offset]
                highest = value if value > highest else highest
                lowest = value if value < lowest else lowest
        else:
            for offset in range(length):
                highest = max(highest, values[start + offset])
                lowest = min(lowest, values[start + offset])
        maxima[block] = highest
        highest_of_all = max(highest_of_all, highest)
        lowest_of_all = min(lowest_of_all, lowest)
    return max(highest_of_all, -lowest_of_all)


@njit(nogil=True, cache=True)
def _bounds(estimate, slack, row, upper, adjustments, work, maxima):  # type: ignore[no-untyped-def]
    """(values, shift) such that ``values + shift`` bounds the adjusted logits, and the maxima."""
    values = estimate[row]
    magnitude = np.float64(block_maxima(values, work.size, maxima))
    shift = np.float32(slack * (1.0 + 1e-6) + magnitude * 2.0**-23 + 2.0**-148)
    if not upper:
        shift = -shift
    if adjustments.active[row]:
        adjust_row(values, shift, row, adjustments, work)
        block_maxima(work, work.size, maxima)
        return work, np.float32(0.0)
    return values, shift


@njit(nogil=True, cache=True)
def _largest(maxima):  # type: ignore[no-untyped-def]
    result = maxima[0]
    for block in range(1, maxima.size):
        result = max(result, maxima[block])
    return result


@njit(nogil=True, cache=True)
def _kth_largest(values, maxima, size, k):  # type: ignore[no-untyped-def]
    """The k-th largest of ``values[:size]``, ``-inf`` where fewer than k are above that."""
    least = MINUS_INFINITY
    if k <= maxima.size:
        keys = np.empty(maxima.size, np.int64)
        for block in range(maxima.size):
            keys[block] = order_key(maxima[block])
        # k blocks reach this value, so k tokens do.
        least = key_value(kth_largest_key(keys, maxima.size, k))
    keys = np.empty(size, np.int64)
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= least:
            for index in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
                if values[index] >= least and values[index] > MINUS_INFINITY:
                    keys[count] = order_key(values[index])
                    count += 1
    if count < k:
        return MINUS_INFINITY
    return key_value(kth_largest_key(keys, count, k))


@njit(nogil=True, cache=True)
def _ceilings(maxima, shift, key, position, inverse_temperature):  # type: ignore[no-untyped-def]
    """Per block a bound on every score in it."""
    result = np.empty(maxima.size, np.float64)
    for block in range(maxima.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        result[block] = np.float64(maxima[block] + shift) * inverse_temperature + noise_ceiling(
            uniform
        )
    return result


@njit(nogil=True, cache=True)
def _best_of_block(  # type: ignore[no-untyped-def]
    values, shift, size, block, key, position, inverse_temperature, best
):
    """The larger of ``best`` and the best score of the block."""
    uniform, winner = block_draw(key, position, np.uint64(block))
    smallest = block_minimum(uniform)
    highest_noise = -math.log(smallest) + NOISE_ROUNDING
    start = block * BLOCK
    stop = min(start + BLOCK, size)
    # The largest value first: what it reaches spares most of the others their noise.
    likely = start
    for index in range(start, stop):
        if values[index] > values[likely]:
            likely = index
    scaled = np.float64(values[likely] + shift) * inverse_temperature
    best = max(best, scaled + np.float64(token_noise(key, position, likely, smallest, winner)))
    for index in range(start, stop):
        scaled = np.float64(values[index] + shift) * inverse_temperature
        if scaled + highest_noise > best:
            noise = token_noise(key, position, index, smallest, winner)
            best = max(best, scaled + np.float64(noise))
    return best


@njit(nogil=True, cache=True)
def _best_score(  # type: ignore[no-untyped-def]
    values, shift, maxima, size, key, position, inverse_temperature
):
    """The largest ``(values + shift) * inverse_temperature + noise`` of a row."""
    ceilings = _ceilings(maxima, shift, key, position, inverse_temperature)
    first = 0
    for block in range(ceilings.size):
        if ceilings[block] > ceilings[first]:
            first = block
    best = -np.inf
    best = _best_of_block(values, shift, size, first, key, position, inverse_temperature, best)
    for block in range(ceilings.size):
        if ceilings[block] > best:
            best = _best_of_block(
                values, shift, size, block, key, position, inverse_temperature, best
            )
    return best


@njit(nogil=True, cache=True)
def _find_thresholds(estimate, slack, size, needs, adjustments):  # type: ignore[no-untyped-def]
    rows = slack.size
    result = np.empty(rows, np.float64)
    work = np.empty(size, np.float32)
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    for row in range(rows):
        if not math.isfinite(slack[row]):
            result[row] = np.nan
            continue
        values, shift = _bounds(estimate, slack[row], row, False, adjustments, work, maxima)
        kind = needs.kind[row]
        scale = needs.inverse_temperature[row]
        if kind == GREEDY:
            result[row] = _largest(maxima) + shift
        elif kind == TOP_K:
            result[row] = _kth_largest(values, maxima, size, needs.k[row]) + shift
        elif kind == GUMBEL:
            result[row] = _best_score(
                values, shift, maxima, size, needs.key[row], needs.position[row], scale
            )
        else:
            top = np.float64(_largest(maxima) + shift)
            result[row] = top * scale + needs.log_min_p[row]
    return result


@njit(nogil=True, cache=True)
def _grown(ids, wanted):  # type: ignore[no-untyped-def]
    if wanted <= ids.size:
        return ids
    larger = np.empty(max(wanted, 2 * ids.size), np.int32)
    larger[: ids.size] = ids
    return larger


@njit(nogil=True, cache=True)
def _collect(  # type: ignore[no-untyped-def]
    values, shift, maxima, size, scale, threshold, ids, count
):
    """Appends the ids with ``(values + shift) * scale >= threshold``."""
    for block in range(maxima.size):
        if maxima[block] == MINUS_INFINITY:
            continue
        if np.float64(maxima[block] + shift) * scale >= threshold:
            ids = _grown(ids, count + BLOCK)
            for index in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
                upper = values[index] + shift
                if np.float64(upper) * scale >= threshold and upper > MINUS_INFINITY:
                    ids[count] = index
                    count += 1
    return ids, count


@njit(nogil=True, cache=True)
def _collect_gumbel(  # type: ignore[no-untyped-def]
    values, shift, maxima, size, key, position, scale, threshold, ids, count
):
    """Appends the ids with ``(values + shift) * scale + noise >= threshold``."""
    ceilings = _ceilings(maxima, shift, key, position, scale)
    for block in range(maxima.size):
        if maxima[block] == MINUS_INFINITY or ceilings[block] < threshold:
            continue
        ids = _grown(ids, count + BLOCK)
        uniform, winner = block_draw(key, position, np.uint64(block))
        smallest = block_minimum(uniform)
        highest_noise = -math.log(smallest) + NOISE_ROUNDING
        for index in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
            upper = values[index] + shift
            scaled = np.float64(upper) * scale
            if scaled + highest_noise >= threshold and upper > MINUS_INFINITY:
                noise = token_noise(key, position, index, smallest, winner)
                if scaled + np.float64(noise) >= threshold:
                    ids[count] = index
                    count += 1
    return ids, count


@njit(nogil=True, cache=True)
def _find_candidates(  # type: ignore[no-untyped-def]
    estimate, slack, size, needs, adjustments, thresholds
):
    rows = slack.size
    offsets = np.zeros(rows + 1, np.int64)
    ids = np.empty(rows * 2 * BLOCK, np.int32)
    count = 0
    work = np.empty(size, np.float32)
    maxima = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    for row in range(rows):
        threshold = thresholds[row]
        kind = needs.kind[row]
        if math.isnan(threshold):
            ids = _grown(ids, count + size)
            for token in range(size):
                ids[count + token] = token
            count += size
        else:
            values, shift = _bounds(estimate, slack[row], row, True, adjustments, work, maxima)
            if kind == GUMBEL:
                ids, count = _collect_gumbel(
                    values,
                    shift,
                    maxima,
                    size,
                    needs.key[row],
                    needs.position[row],
                    needs.inverse_temperature[row],
                    threshold,
                    ids,
                    count,
                )
            else:
                compares_logits = kind in (GREEDY, TOP_K)
                scale = 1.0 if compares_logits else needs.inverse_temperature[row]
                ids, count = _collect(values, shift, maxima, size, scale, threshold, ids, count)
        offsets[row + 1] = count
    return ids[:count].copy(), offsets


def find_thresholds(
    estimate: npt.NDArray[np.float32],
    slack: npt.NDArray[np.float64],
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
) -> npt.NDArray[np.float64]:
    return _find_thresholds(estimate, slack, vocabulary_size, needs, adjustments)


def find_candidates(
    estimate: npt.NDArray[np.float32],
    slack: npt.NDArray[np.float64],
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    return _find_candidates(estimate, slack, vocabulary_size, needs, adjustments, thresholds)
