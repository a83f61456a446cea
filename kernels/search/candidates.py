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
    number_of,
    slack_factors,
    upper_bounds,
)
from lexshard.kernels.search.types import GREEDY, GUMBEL, TOP_K


@njit(nogil=True, cache=True)
def _grown(ids, wanted):  # type: ignore[no-untyped-def]
    if wanted <= ids.size:
        return ids
    larger = np.empty(max(wanted, 2 * ids.size), np.int32)
    copy_into(larger, ids)
    return larger


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
def find_candidates(  # type: ignore[no-untyped-def]
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
    """The fields of `kernels.search.Found`."""
    rows = values.shape[0]
    offsets = np.zeros(rows + 1, np.int64)
    largest = np.empty(rows, np.float64)
    ids = np.empty(rows * 2 * BLOCK, np.int32)
    count = 0
    of_block = np.empty(BLOCK, np.float32)
    for row in range(rows):
        own, factors = values[row], slack_factors(hidden_slack[row])
        ceilings = block_bounds(maxima[row], block_slack, factors)
        if adjustments.active[row]:
            cover(ceilings, own, row_slack, factors, size, row, adjustments)
        kind, threshold = needs.kind[row], thresholds[row]
        key, position = needs.key[row], needs.position[row]
        scale = 1.0 if kind in (GREEDY, TOP_K) else needs.inverse_temperature[row]
        highest = MINUS_INFINITY
        for block in range(ceilings.size):
            ceiling = np.float64(ceilings[block]) * scale
            if kind == GUMBEL:
                ceiling += noise[row, block]
            if ceilings[block] == MINUS_INFINITY or ceiling < threshold:
                highest = max(highest, ceilings[block])
                continue
            ids = _grown(ids, count + BLOCK)
            start = block * BLOCK
            upper = of_block
            if start + BLOCK <= size:
                write_block_bounds(own, row_slack, factors, start, upper)
            else:
                upper = of_block[: size - start]
                upper_bounds(own, row_slack, factors, start, upper)
            if adjustments.active[row]:
                adjust_block(upper, start, row, adjustments)
            bound = largest_of(upper)
            highest = max(highest, bound)
            ceiling = np.float64(bound) * scale
            if kind == GUMBEL:
                ceiling += noise[row, block]
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
        largest[row] = highest
        offsets[row + 1] = count
    return ids[:count].copy(), offsets, largest


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
