"""The search in numba: one pass for the maxima of blocks of 64 ids, then only blocks that matter.

What the first pass finds serves the second: only rows with adjustments are written out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from kernels.penalties.cpu import MINUS_INFINITY, adjust_candidates, adjust_row
from kernels.search.kinds import GREEDY, GUMBEL, TOP_K
from kernels.search.reference import INFLATION, SMALLEST_FACTOR, SMALLEST_SLACK, ULP_SHARE
from kernels.search.selection import key_value, kth_largest_key, order_key

if TYPE_CHECKING:
    from kernels.penalties import Adjustments
    from kernels.search import Estimates, Found, Leaders, Needs, Ragged

BLOCK = 64
# Above the rounding of any fp32 noise (at most 43), below anything that would open more blocks.
NOISE_ROUNDING = 1e-5


@njit(nogil=True, cache=True)
def fp32_slack(hidden_slack):  # type: ignore[no-untyped-def]
    """The three factors of `kernels.search.reference.outward`."""
    return (
        np.float32(hidden_slack[0] * INFLATION + SMALLEST_FACTOR),
        np.float32(hidden_slack[1] * INFLATION + SMALLEST_FACTOR),
        np.float32(np.float32(hidden_slack[2] * INFLATION + SMALLEST_FACTOR) + SMALLEST_SLACK),
    )


@njit(nogil=True, cache=True)
def upper_bounds(values, row_slack, hidden_slack, upper):  # type: ignore[no-untyped-def]
    """Writes the upper bounds of a row."""
    error, size, rest = fp32_slack(hidden_slack)
    errors = row_slack[0]
    sizes = row_slack[1]
    for i in range(upper.size):
        slack = error * errors[i] + size * sizes[i] + rest
        upper[i] = values[i] + (slack + abs(values[i]) * ULP_SHARE)


# The flags let the maxima vectorise; no value is NaN, and the sign of a zero does not matter.
@njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})
def _block_maxima(values, maxima, size):  # type: ignore[no-untyped-def]
    """The largest value of every block."""
    for block in range(maxima.size):
        start = block * BLOCK
        length = BLOCK if start + BLOCK <= size else size - start
        highest = MINUS_INFINITY
        if length == BLOCK:
            for offset in range(BLOCK):
                value = values[start + offset]
                highest = value if value > highest else highest
        else:
            for offset in range(length):
                value = values[start + offset]
                highest = value if value > highest else highest
        maxima[block] = highest


@njit(nogil=True, cache=True)
def _place_of_best(maxima, values, size):  # type: ignore[no-untyped-def]
    """Where the largest value stands, -1 where all are excluded."""
    best = 0
    for block in range(1, maxima.size):
        if maxima[block] > maxima[best]:
            best = block
    if maxima[best] == MINUS_INFINITY:
        return -1
    for index in range(best * BLOCK, min(best * BLOCK + BLOCK, size)):
        if values[index] == maxima[best]:
            return index
    return -1


@njit(nogil=True, cache=True)
def _best_of(values, maxima, size, k, ids):  # type: ignore[no-untyped-def]
    """Fills ``ids`` with the k largest values' places in order; returns how many there are."""
    least = MINUS_INFINITY
    if k <= maxima.size:
        keys = np.empty(maxima.size, np.int64)
        for block in range(maxima.size):
            keys[block] = order_key(maxima[block])
        # k blocks reach this value, so k tokens do.
        least = key_value(kth_largest_key(keys, maxima.size, k))
    keys = np.empty(size, np.int64)
    places = np.empty(size, np.int32)
    count = 0
    for block in range(maxima.size):
        if maxima[block] >= least:
            for index in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
                if values[index] >= least and values[index] > MINUS_INFINITY:
                    keys[count] = order_key(values[index])
                    places[count] = index
                    count += 1
    if count <= k:
        ids[:count] = places[:count]
        return count
    edge = key_value(kth_largest_key(keys, count, k))
    above = 0
    for index in range(count):
        above += values[places[index]] > edge
    kept = 0
    equal = k - above
    for index in range(count):
        value = values[places[index]]
        if value > edge or (value == edge and equal > 0):
            equal -= value == edge
            ids[kept] = places[index]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _noise_ceilings(key, position, result):  # type: ignore[no-untyped-def]
    """Per block a bound on every noise in it."""
    for block in range(result.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        result[block] = noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def _best_of_block(  # type: ignore[no-untyped-def]
    values, size, block, key, position, inverse_temperature, place, best
):
    """The better of (place, best) and the best score of the block."""
    uniform, winner = block_draw(key, position, np.uint64(block))
    smallest = block_minimum(uniform)
    highest_noise = -math.log(smallest) + NOISE_ROUNDING
    for index in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
        scaled = np.float64(values[index]) * inverse_temperature
        if scaled + highest_noise > best:
            noise = token_noise(key, position, index, smallest, winner)
            score = scaled + np.float64(noise)
            if score > best:
                best = score
                place = index
    return place, best


@njit(nogil=True, cache=True)
def _place_of_best_score(  # type: ignore[no-untyped-def]
    values, maxima, noise, size, key, position, inverse_temperature
):
    """Where ``values * inverse_temperature + noise`` is largest, -1 where all are excluded.

    ``noise`` bounds that of every block.
    """
    ceilings = maxima.astype(np.float64) * inverse_temperature + noise
    first = 0
    for block in range(ceilings.size):
        if ceilings[block] > ceilings[first]:
            first = block
    place, best = _best_of_block(
        values, size, first, key, position, inverse_temperature, -1, -np.inf
    )
    for block in range(ceilings.size):
        if ceilings[block] > best:
            place, best = _best_of_block(
                values, size, block, key, position, inverse_temperature, place, best
            )
    return place


@njit(nogil=True, cache=True)
def _find_leaders(values, size, needs, adjustments):  # type: ignore[no-untyped-def]
    rows = values.shape[0]
    offsets = np.zeros(rows + 1, np.int64)
    room = 0
    for row in range(rows):
        room += min(needs.k[row], size) if needs.kind[row] == TOP_K else 1
    ids = np.empty(room, np.int32)
    count = 0
    work = np.empty(size, np.float32)
    maxima = np.empty((rows, (size + BLOCK - 1) // BLOCK), np.float32)
    noise = np.empty(maxima.shape, np.float64)
    for row in range(rows):
        estimate = values[row]
        if adjustments.active[row]:
            work[:] = estimate[:size]
            adjust_row(work, row, adjustments)
            estimate = work
        _block_maxima(estimate, maxima[row], size)
        kind = needs.kind[row]
        if kind == TOP_K:
            count += _best_of(estimate, maxima[row], size, needs.k[row], ids[count:])
        else:
            if kind == GUMBEL:
                scale = needs.inverse_temperature[row]
                key, position = needs.key[row], needs.position[row]
                _noise_ceilings(key, position, noise[row])
                place = _place_of_best_score(
                    estimate, maxima[row], noise[row], size, key, position, scale
                )
            else:
                place = _place_of_best(maxima[row], estimate, size)
            if place >= 0:
                ids[count] = place
                count += 1
        offsets[row + 1] = count
    return ids[:count].copy(), offsets, maxima, noise


@njit(nogil=True, cache=True)
def _find_thresholds(ids, logits, offsets, needs):  # type: ignore[no-untyped-def]
    rows = offsets.size - 1
    result = np.full(rows, -np.inf)
    for row in range(rows):
        start, stop = offsets[row], offsets[row + 1]
        kind = needs.kind[row]
        scale = needs.inverse_temperature[row]
        best = -np.inf
        if kind == TOP_K:
            if stop - start >= needs.k[row]:
                keys = np.empty(stop - start, np.int64)
                for index in range(start, stop):
                    keys[index - start] = order_key(logits[index])
                best = np.float64(key_value(kth_largest_key(keys, keys.size, needs.k[row])))
        else:
            for index in range(start, stop):
                score = np.float64(logits[index])
                if kind != GREEDY:
                    score = score * scale
                if kind == GUMBEL:
                    token = ids[index]
                    key, position = needs.key[row], needs.position[row]
                    uniform, winner = block_draw(key, position, np.uint64(token // BLOCK))
                    smallest = block_minimum(uniform)
                    score += np.float64(token_noise(key, position, token, smallest, winner))
                best = max(best, score)
            if kind != GREEDY and kind != GUMBEL:
                best += needs.log_min_p[row]
        result[row] = best
    return result


@njit(nogil=True, cache=True)
def _grown(ids, wanted):  # type: ignore[no-untyped-def]
    if wanted <= ids.size:
        return ids
    larger = np.empty(max(wanted, 2 * ids.size), np.int32)
    larger[: ids.size] = ids
    return larger


@njit(nogil=True, cache=True)
def _block_bounds(maxima, block_slack, hidden_slack):  # type: ignore[no-untyped-def]
    """Per block a bound on every upper bound in it, from the largest estimate and slacks."""
    error, size, rest = fp32_slack(hidden_slack)
    result = np.empty(maxima.size, np.float32)
    for block in range(maxima.size):
        highest = maxima[block]
        slack = error * block_slack[0, block] + size * block_slack[1, block] + rest
        # Twice the share: the estimate behind the largest bound may be another, a rounding away.
        result[block] = highest + (slack + np.float32(2.0) * abs(highest) * ULP_SHARE)
    return result


@njit(nogil=True, cache=True)
def _upper_of_block(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, start, stop, upper
):
    error, size, rest = fp32_slack(hidden_slack)
    for i in range(start, stop):
        slack = error * row_slack[0, i] + size * row_slack[1, i] + rest
        upper[i - start] = values[i] + (slack + abs(values[i]) * ULP_SHARE)


@njit(nogil=True, cache=True)
def _find_candidates(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    hidden_slack,
    block_slack,
    size,
    needs,
    adjustments,
    thresholds,
    maxima,
    noise,
):
    rows = values.shape[0]
    offsets = np.zeros(rows + 1, np.int64)
    largest = np.empty(rows, np.float64)
    ids = np.empty(rows * 2 * BLOCK, np.int32)
    count = 0
    whole_row = np.empty(size, np.float32)
    own_maxima = np.empty(maxima.shape[1], np.float32)
    of_block = np.empty(BLOCK, np.float32)
    for row in range(rows):
        adjusted = adjustments.active[row]
        if adjusted:
            upper_bounds(values[row], row_slack, hidden_slack[row], whole_row)
            adjust_row(whole_row, row, adjustments)
            _block_maxima(whole_row, own_maxima, size)
            bounds = own_maxima
        else:
            bounds = _block_bounds(maxima[row], block_slack, hidden_slack[row])
        largest[row] = bounds.max()
        kind, threshold = needs.kind[row], thresholds[row]
        scale = 1.0 if kind in (GREEDY, TOP_K) else needs.inverse_temperature[row]
        key, position = needs.key[row], needs.position[row]
        for block in range(bounds.size):
            ceiling = np.float64(bounds[block]) * scale
            if kind == GUMBEL:
                ceiling += noise[row, block]
            if bounds[block] == MINUS_INFINITY or ceiling < threshold:
                continue
            ids = _grown(ids, count + BLOCK)
            start, stop = block * BLOCK, min(block * BLOCK + BLOCK, size)
            upper = of_block
            if adjusted:
                upper = whole_row[start:stop]
            else:
                _upper_of_block(values[row], row_slack, hidden_slack[row], start, stop, upper)
            smallest, winner, highest_noise = 1.0, np.uint64(0), 0.0
            if kind == GUMBEL:
                uniform, winner = block_draw(key, position, np.uint64(block))
                smallest = block_minimum(uniform)
                highest_noise = -math.log(smallest) + NOISE_ROUNDING
            for index in range(start, stop):
                bound = upper[index - start]
                score = np.float64(bound) * scale
                if bound == MINUS_INFINITY or score + highest_noise < threshold:
                    continue
                if kind == GUMBEL:
                    score += np.float64(token_noise(key, position, index, smallest, winner))
                    if score < threshold:
                        continue
                ids[count] = index
                count += 1
        offsets[row + 1] = count
    return ids[:count].copy(), offsets, largest


@njit(nogil=True, cache=True)
def _narrow(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, block_slack, ids, offsets, needs, adjustments, thresholds
):
    rows = offsets.size - 1
    upper = np.empty(ids.size, np.float32)
    for row in range(rows):
        error, size, rest = fp32_slack(hidden_slack[row])
        for index in range(offsets[row], offsets[row + 1]):
            token, value = ids[index], values[index]
            slack = error * row_slack[0, token] + size * row_slack[1, token]
            upper[index] = value + (slack + rest + abs(value) * ULP_SHARE)
    upper = adjust_candidates(ids, upper, offsets, adjustments)
    kept = np.empty(ids.size, np.int32)
    kept_offsets = np.zeros(rows + 1, np.int64)
    count = 0
    for row in range(rows):
        kind, scale = needs.kind[row], needs.inverse_temperature[row]
        key, position = needs.key[row], needs.position[row]
        for index in range(offsets[row], offsets[row + 1]):
            token = ids[index]
            score = np.float64(upper[index])
            if score == -np.inf:
                continue
            if kind not in (GREEDY, TOP_K):
                score *= scale
            if kind == GUMBEL:
                uniform, winner = block_draw(key, position, np.uint64(token // BLOCK))
                smallest = block_minimum(uniform)
                score += np.float64(token_noise(key, position, token, smallest, winner))
            if score >= thresholds[row]:
                kept[count] = token
                count += 1
        kept_offsets[row + 1] = count
    return kept[:count].copy(), kept_offsets


def find_leaders(
    estimates: Estimates, vocabulary_size: int, needs: Needs, adjustments: Adjustments
) -> Leaders:
    from kernels.search import Leaders

    return Leaders(*_find_leaders(estimates.values, vocabulary_size, needs, adjustments))


def find_thresholds(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
) -> npt.NDArray[np.float64]:
    return _find_thresholds(ids, logits, offsets, needs)


def find_candidates(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
    leaders: Leaders,
) -> Found:
    from kernels.search import Found

    maxima, noise = leaders.maxima, leaders.noise
    arguments = (vocabulary_size, needs, adjustments, thresholds, maxima, noise)
    return Found(*_find_candidates(*estimates, *arguments))


def narrow(
    estimates: Estimates,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
) -> Ragged:
    return _narrow(*estimates, ids, offsets, needs, adjustments, thresholds)
