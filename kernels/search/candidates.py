"""The tokens whose upper bound reaches a threshold, from the blocks that can hold them."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.block_maxima import largest_of
from lexshard.kernels.block_vectors import least_logit, reaching, write_block_bounds
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
from lexshard.kernels.penalties.cpu import MINUS_INFINITY, adjust, adjust_block
from lexshard.kernels.rounding import NOISE_ROUNDING
from lexshard.kernels.search.blocks import (
    block_bounds,
    cover,
    joined,
    number_of,
    slack_factors,
    upper_bounds,
)
from lexshard.kernels.search.types import GREEDY, GUMBEL, TOP_K
from lexshard.kernels.team.jobs import run


@njit(nogil=True, cache=True)
def _keep_of_block(  # type: ignore[no-untyped-def]
    upper, block, token_ids, by_block, kind, key, position, scale, threshold, ids
):
    """Writes the ids of the block that reach the threshold; how many."""
    smallest, winner, highest_noise, first = 1.0, np.uint64(0), 0.0, 0
    if kind == GUMBEL and by_block:
        number = number_of(block, token_ids)
        uniform, winner = block_draw(key, position, number)
        smallest = block_minimum(uniform)
        highest_noise = -math.log(smallest) + NOISE_ROUNDING
        first = np.int64(number) * BLOCK
    elif kind == GUMBEL:
        highest_noise = np.inf
    count = 0
    places = reaching(upper, least_logit(threshold, highest_noise, scale))
    while places != NONE:
        offset = lowest_bit(places)
        places &= places - ONE
        bound = upper[offset]
        score = np.float64(bound) * scale
        if bound == MINUS_INFINITY or score + highest_noise < threshold:
            continue
        row = block * BLOCK + offset
        if kind == GUMBEL:
            if by_block:
                most = fresh_ceiling(key, position, first + offset, smallest, winner)
                if score + most < threshold:
                    continue
                noise = token_noise(key, position, first + offset, smallest, winner)
            else:
                noise = noise_of(key, position, token_ids[row])
            score += np.float64(noise)
            if score < threshold:
                continue
        ids[count] = row
        count += 1
    return count


@njit(nogil=True, cache=True)
def _count_blocks(  # type: ignore[no-untyped-def]
    rank, threads, pieces, bounds, rows, thresholds, outline, ceilings, counts, largest
):
    """Of every row of a thread the ``ceilings`` that reach the threshold, minus infinity in place
    of others, how many do in each of ``pieces``, and in ``largest`` the highest of the others."""
    values, row_slack, hidden_slack, block_slack = bounds
    size, needs, adjustments = rows
    maxima, noise = outline
    for row in range(rank, values.shape[0], threads):
        own, factors = ceilings[row], slack_factors(hidden_slack[row])
        copy_into(own, block_bounds(maxima[row], block_slack, factors))
        if adjustments.active[row]:
            cover(own, values[row], row_slack, factors, size, row, adjustments)
        kind, threshold, bounded = needs.kind[row], thresholds[row], noise[row]
        scale = 1.0 if kind in (GREEDY, TOP_K) else needs.inverse_temperature[row]
        highest = MINUS_INFINITY
        for piece in range(pieces):
            reached = 0
            for block in range(own.size * piece // pieces, own.size * (piece + 1) // pieces):
                ceiling = np.float64(own[block]) * scale
                if kind == GUMBEL:
                    ceiling += bounded[block]
                if own[block] == MINUS_INFINITY or ceiling < threshold:
                    highest = max(highest, own[block])
                    own[block] = MINUS_INFINITY
                else:
                    reached += 1
            counts[row * pieces + piece] = reached
        largest[row] = highest


@njit(nogil=True, cache=True)
def _keep(  # type: ignore[no-untyped-def]
    rank,
    threads,
    pieces,
    bounds,
    tokens,
    rows,
    thresholds,
    noise,
    ceilings,
    room,
    ids,
    counts,
    most,
):
    """Fills ``ids``, from ``room`` on, ``counts`` and the highest upper bound ``most`` of every
    piece of a thread."""
    values, row_slack, hidden_slack, _ = bounds
    size, needs, adjustments = rows
    token_ids, by_block = tokens
    of_block = np.empty(BLOCK, np.float32)
    for part in range(rank, counts.size, threads):
        row, piece = part // pieces, part % pieces
        own, factors, reaches = values[row], slack_factors(hidden_slack[row]), ceilings[row]
        kind, threshold, active = needs.kind[row], thresholds[row], adjustments.active[row]
        key, position, bounded = needs.key[row], needs.position[row], noise[row]
        scale = 1.0 if kind in (GREEDY, TOP_K) else needs.inverse_temperature[row]
        highest, count, blocks = MINUS_INFINITY, room[part], reaches.size
        for block in range(blocks * piece // pieces, blocks * (piece + 1) // pieces):
            if reaches[block] == MINUS_INFINITY:
                continue
            start = block * BLOCK
            upper = of_block
            if start + BLOCK <= size:
                write_block_bounds(own, row_slack, factors, start, upper)
            else:
                upper = of_block[: size - start]
                upper_bounds(own, row_slack, factors, start, upper)
            if active:
                adjust_block(upper, start, row, adjustments)
            bound = largest_of(upper)
            highest = max(highest, bound)
            ceiling = np.float64(bound) * scale
            if kind == GUMBEL:
                ceiling += bounded[block]
            if bound > MINUS_INFINITY and ceiling >= threshold:
                count += _keep_of_block(
                    upper,
                    block,
                    token_ids,
                    by_block,
                    kind,
                    key,
                    position,
                    scale,
                    threshold,
                    ids[count:],
                )
        most[part], counts[part] = highest, count - room[part]


@njit(nogil=True, cache=True)
def find_candidates(  # type: ignore[no-untyped-def]
    team,
    threads,
    values,
    row_slack,
    hidden_slack,
    block_slack,
    token_ids,
    by_block,
    size,
    needs,
    adjustments,
    thresholds,
    maxima,
    noise,
):
    """The fields of `kernels.search.Found`. Threads share rows, and pieces of too few."""
    count = values.shape[0]
    pieces = 1 if count >= threads else threads
    bounds = (values, row_slack, hidden_slack, block_slack)
    rows, outline = (size, needs, adjustments), (maxima, noise)
    ceilings, largest = np.empty(maxima.shape, np.float32), np.empty(count, np.float64)
    counts, most = np.empty(count * pieces, np.int64), np.empty(count * pieces, np.float32)
    reached = (ceilings, counts, largest)
    run(team, threads, _count_blocks, (pieces, bounds, rows, thresholds, outline, *reached))
    room = np.zeros(counts.size + 1, np.int64)
    for part in range(counts.size):
        room[part + 1] = room[part] + BLOCK * counts[part]
    ids = np.empty(room[counts.size], np.int32)
    kept = (room, ids, counts, most)
    tokens = (token_ids, by_block)
    run(team, threads, _keep, (pieces, bounds, tokens, rows, thresholds, noise, ceilings, *kept))
    ids, ends = joined(ids, room, counts)
    for part in range(counts.size):
        largest[part // pieces] = max(largest[part // pieces], np.float64(most[part]))
    return ids, ends[::pieces].copy(), largest


@njit(nogil=True, cache=True)
def narrow(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    hidden_slack,
    block_slack,
    token_ids,
    by_block,
    ids,
    offsets,
    needs,
    adjustments,
    thresholds,
):
    """Those of ``ids`` whose upper bound, from their own ``values``, reaches the threshold."""
    rows = offsets.size - 1
    upper = np.empty(ids.size, np.float32)
    for row in range(rows):
        error, size, rest, share = slack_factors(hidden_slack[row])
        for index in range(offsets[row], offsets[row + 1]):
            token, value = ids[index], values[index]
            slack = error * row_slack[0, token] + size * row_slack[1, token]
            upper[index] = value + (slack + rest + abs(value) * share)
    upper = adjust(ids, upper, offsets, adjustments)
    kept = np.empty(ids.size, np.int32)
    kept_offsets = np.zeros(rows + 1, np.int64)
    count = 0
    for row in range(rows):
        kind, scale = needs.kind[row], needs.inverse_temperature[row]
        key, position = needs.key[row], needs.position[row]
        for index in range(offsets[row], offsets[row + 1]):
            row_id = ids[index]
            score = np.float64(upper[index])
            if score == -np.inf:
                continue
            if kind not in (GREEDY, TOP_K):
                score *= scale
            if kind == GUMBEL:
                token = row_id if token_ids.size == 0 else token_ids[row_id]
                score += np.float64(noise_of(key, position, token))
            if score >= thresholds[row]:
                kept[count] = row_id
                count += 1
        kept_offsets[row + 1] = count
    return kept[:count].copy(), kept_offsets
