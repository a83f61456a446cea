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
from lexshard.kernels.search.blocks import NO_SLACK, cover, joined, noise_ceilings, number_of
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key
from lexshard.kernels.search.types import GUMBEL, TOP_K
from lexshard.kernels.team.jobs import run

# Of an adjusted row, at least so many blocks are looked at at once.
FEWEST_BLOCKS = 16


@njit(nogil=True, cache=True)
def _adjusted(estimates, start, row, adjustments, work):  # type: ignore[no-untyped-def]
    """``work`` [64] with the adjusted ``estimates`` of the tokens from ``start`` on. What has
    adjustments takes longer than all else, be they of no use: it is called where they are."""
    result = work[: estimates.size]
    copy_into(result, estimates)
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
    active = adjustments.active[row]
    blocks = max(2 * k, FEWEST_BLOCKS) if active else k
    while True:
        least = _kth_ceiling(ceilings, blocks, keys)
        count = 0
        for block in range(ceilings.size):
            if ceilings[block] >= least and ceilings[block] > MINUS_INFINITY:
                start = block * BLOCK
                estimates = values[start : min(start + BLOCK, size)]
                if active:
                    estimates = _adjusted(estimates, start, row, adjustments, work)
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
    place, best, active = np.int64(-1), -np.inf, adjustments.active[row]
    for step in range(-1, scores.size):
        # The likeliest block sets a high mark, which most of the others cannot reach.
        block = first if step < 0 else step
        if step < 0 or scores[block] > best:
            start = block * BLOCK
            estimates = values[start : min(start + BLOCK, size)]
            if active:
                estimates = _adjusted(estimates, start, row, adjustments, work)
            place, best = _best_score_of_block(
                estimates, block, token_ids, by_block, key, position, scale, place, best
            )
    return place


@njit(nogil=True, cache=True)
def outline_blocks(  # type: ignore[no-untyped-def]
    values, token_ids, by_block, size, needs, adjustments, first, last, maxima, noise
):
    """Fills ``maxima`` and ``noise`` (`kernels.search.Leaders`) of the blocks ``first`` to
    ``last - 1``."""
    begin, end = BLOCK * first, min(BLOCK * last, size)
    for row in range(values.shape[0]):
        estimates, own = values[row, begin:end], maxima[row, first:last]
        if adjustments.active[row] and adjustments.mask[row] >= 0:
            held_maxima(estimates, adjustments.masks[adjustments.mask[row], first:last], own)
        else:
            block_maxima(estimates, own)
        if needs.kind[row] == GUMBEL:
            key, position = needs.key[row], needs.position[row]
            numbers = (first, last, noise[row])
            noise_ceilings(key, position, token_ids, by_block, size, *numbers)


@njit(nogil=True, cache=True)
def _lead(  # type: ignore[no-untyped-def]
    rank,
    threads,
    values,
    row_slack,
    tokens,
    size,
    needs,
    adjustments,
    maxima,
    noise,
    room,
    ids,
    counts,
):
    """Fills ``ids``, from ``room[row]`` on, and ``counts`` of every row of a thread."""
    token_ids, by_block = tokens
    work, kept = np.empty(BLOCK, np.float32), 0
    for row in range(rank, values.shape[0], threads):
        if needs.kind[row] != GUMBEL:
            kept = size
    keys, found = np.empty(kept, np.int64), np.empty(kept, np.int32)
    for row in range(rank, values.shape[0], threads):
        estimates, ceilings = values[row], maxima[row]
        if adjustments.active[row]:
            ceilings = maxima[row].copy()
            cover(ceilings, estimates, row_slack, NO_SLACK, size, row, adjustments)
        if needs.kind[row] == GUMBEL:
            place = _best_score(
                estimates,
                ceilings,
                noise[row],
                token_ids,
                by_block,
                size,
                needs.key[row],
                needs.position[row],
                needs.inverse_temperature[row],
                row,
                adjustments,
                work,
            )
            if place >= 0:
                ids[room[row]] = place
                counts[row] = 1
        else:
            k = needs.k[row] if needs.kind[row] == TOP_K else 1
            own = ids[room[row] :]
            counts[row] = _best_of(
                estimates, ceilings, size, k, row, adjustments, work, keys, found, own
            )


@njit(nogil=True, cache=True)
def find_leaders(  # type: ignore[no-untyped-def]
    team, threads, values, row_slack, token_ids, by_block, size, needs, adjustments, maxima, noise
):
    """The ids and offsets of `kernels.search.Leaders`, whose other fields are known."""
    rows = values.shape[0]
    room = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        room[row + 1] = room[row] + (min(needs.k[row], size) if needs.kind[row] == TOP_K else 1)
    ids, counts = np.empty(room[rows], np.int32), np.zeros(rows, np.int64)
    tokens, asked = (token_ids, by_block), (size, needs, adjustments, maxima, noise)
    run(team, threads, _lead, (values, row_slack, tokens, *asked, room, ids, counts))
    return joined(ids, room, counts)
