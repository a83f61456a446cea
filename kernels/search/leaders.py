"""The tokens with the best adjusted estimates, from the blocks that can hold them."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.block_maxima import block_maxima, held_maxima
from lexshard.kernels.block_vectors import least_logit, reaching
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.copies import copy_into
from lexshard.kernels.masks import NONE, ONE, lowest_bit
from lexshard.kernels.noise.cpu import (
    block_draw,
    block_minimum,
    fresh_ceiling,
    noise_of,
    token_noise,
)
from lexshard.kernels.penalties.cpu import MINUS_INFINITY, adjust_block
from lexshard.kernels.rounding import NOISE_ROUNDING
from lexshard.kernels.search.blocks import NO_SLACK, cover, noise_ceilings, number_of
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key
from lexshard.kernels.search.types import GUMBEL, TOP_K

# Of an adjusted row, at least so many blocks are looked at at once.
FEWEST_BLOCKS = 16


@njit(nogil=True, cache=True, inline="always")
def _estimates(values, size, block, row, adjustments, work):  # type: ignore[no-untyped-def]
    """The adjusted estimates of a block; may be ``work`` [64], overwritten."""
    start, stop = block * BLOCK, min(block * BLOCK + BLOCK, size)
    if not adjustments.active[row]:
        return values[start:stop]
    result = work[: stop - start]
    copy_into(result, values[start:stop])
    adjust_block(result, start, row, adjustments)
    return result


@njit(nogil=True, cache=True)
def _kth_ceiling(ceilings, k, keys):  # type: ignore[no-untyped-def]
    """The k-th largest ceiling, minus infinity where there are fewer."""
    if k == 1:
        return ceilings.max()
    if k > ceilings.size:
        return MINUS_INFINITY
    for block in range(ceilings.size):
        keys[block] = order_key(ceilings[block])
    return key_value(kth_largest_key(keys, ceilings.size, k))


@njit(nogil=True, cache=True)
def _best_of(  # type: ignore[no-untyped-def]
    values, ceilings, size, k, row, adjustments, work, keys, found, ids
):
    """Fills ``ids`` with the k best tokens in order of id; returns how many there are.

    All tokens from some ceiling on are collected, and where these are too few, from a lower one.
    Without adjustments k blocks reach the k-th largest ceiling, so k tokens do.
    """
    blocks = max(2 * k, FEWEST_BLOCKS) if adjustments.active[row] else k
    while True:
        least = _kth_ceiling(ceilings, blocks, keys)
        count = 0
        for block in range(ceilings.size):
            if ceilings[block] >= least and ceilings[block] > MINUS_INFINITY:
                estimates = _estimates(values, size, block, row, adjustments, work)
                for offset in range(estimates.size):
                    if estimates[offset] >= least and estimates[offset] > MINUS_INFINITY:
                        keys[count] = order_key(estimates[offset])
                        found[count] = block * BLOCK + offset
                        count += 1
        if count >= k or least == MINUS_INFINITY:
            break
        blocks *= 2
    if count <= k:
        copy_into(ids, found[:count])
        return count
    edge = kth_largest_key(keys[:count].copy(), count, k)
    above = 0
    for index in range(count):
        above += keys[index] > edge
    kept = 0
    equal = k - above
    for index in range(count):
        if keys[index] > edge or (keys[index] == edge and equal > 0):
            equal -= keys[index] == edge
            ids[kept] = found[index]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _best_score_of_block(  # type: ignore[no-untyped-def]
    estimates, block, token_ids, by_block, key, position, inverse_temperature, place, best
):
    """The better of (place, best) and the best score of the block."""
    smallest, winner, highest_noise, first = 1.0, np.uint64(0), np.inf, 0
    least = best
    if by_block:
        number = number_of(block, token_ids)
        uniform, winner = block_draw(key, position, number)
        smallest = block_minimum(uniform)
        highest_noise = -math.log(smallest) + NOISE_ROUNDING
        first = np.int64(number) * BLOCK
        if place < 0 and np.int64(winner) < estimates.size:
            # The first block of all: few of its tokens reach the one with the most noise.
            noise = token_noise(key, position, winner, smallest, winner)
            least = np.float64(estimates[winner]) * inverse_temperature + np.float64(noise)
    places = reaching(estimates, least_logit(least, highest_noise, inverse_temperature))
    while places != NONE:
        offset = lowest_bit(places)
        places &= places - ONE
        scaled = np.float64(estimates[offset]) * inverse_temperature
        if scaled + highest_noise > best:
            row = block * BLOCK + offset
            if by_block:
                most = fresh_ceiling(key, position, first + offset, smallest, winner)
                if scaled + most <= best:
                    continue
                noise = token_noise(key, position, first + offset, smallest, winner)
            else:
                noise = noise_of(key, position, token_ids[row])
            score = scaled + np.float64(noise)
            if score > best:
                best = score
                place = row
    return place, best


@njit(nogil=True, cache=True)
def _best_score(  # type: ignore[no-untyped-def]
    values, ceilings, noise, token_ids, by_block, size, key, position, scale, row, adjustments, work
):
    """Where ``estimate * scale + noise`` is largest, -1 where all are excluded.

    ``noise`` bounds that of every block.
    """
    scores = ceilings.astype(np.float64) * scale + noise
    first = 0
    for block in range(scores.size):
        if scores[block] > scores[first]:
            first = block
    place, best = np.int64(-1), -np.inf
    for step in range(-1, scores.size):
        # The likeliest block sets a high mark, which most of the others cannot reach.
        block = first if step < 0 else step
        if step < 0 or scores[block] > best:
            estimates = _estimates(values, size, block, row, adjustments, work)
            place, best = _best_score_of_block(
                estimates, block, token_ids, by_block, key, position, scale, place, best
            )
    return place


@njit(nogil=True, cache=True)
def find_leaders(  # type: ignore[no-untyped-def]
    values, row_slack, token_ids, by_block, size, needs, adjustments
):
    """The fields of `kernels.search.Leaders`."""
    rows = values.shape[0]
    offsets = np.zeros(rows + 1, np.int64)
    room, kept = 0, 0
    for row in range(rows):
        room += min(needs.k[row], size) if needs.kind[row] == TOP_K else 1
        if needs.kind[row] != GUMBEL:
            kept = size
    ids = np.empty(room, np.int32)
    count = 0
    maxima = np.empty((rows, (size + BLOCK - 1) // BLOCK), np.float32)
    noise = np.empty(maxima.shape, np.float64)
    work = np.empty(BLOCK, np.float32)
    keys = np.empty(kept, np.int64)
    found = np.empty(kept, np.int32)
    for row in range(rows):
        estimates = values[row]
        if adjustments.active[row] and adjustments.mask[row] >= 0:
            words = adjustments.masks[adjustments.mask[row]]
            held_maxima(estimates[:size], words, maxima[row])
        else:
            block_maxima(estimates[:size], maxima[row])
        ceilings = maxima[row]
        if adjustments.active[row]:
            ceilings = maxima[row].copy()
            cover(ceilings, estimates, row_slack, NO_SLACK, size, row, adjustments)
        if needs.kind[row] == GUMBEL:
            key, position = needs.key[row], needs.position[row]
            noise_ceilings(key, position, token_ids, by_block, size, noise[row])
            scale, own = needs.inverse_temperature[row], noise[row]
            place = _best_score(
                estimates,
                ceilings,
                own,
                token_ids,
                by_block,
                size,
                key,
                position,
                scale,
                row,
                adjustments,
                work,
            )
            if place >= 0:
                ids[count] = place
                count += 1
        else:
            k = needs.k[row] if needs.kind[row] == TOP_K else 1
            count += _best_of(
                estimates, ceilings, size, k, row, adjustments, work, keys, found, ids[count:]
            )
        offsets[row + 1] = count
    return ids[:count].copy(), offsets, maxima, noise
