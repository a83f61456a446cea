"""Masses in numba: one pass over a row of bounds per side, exponentials vectorised."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.block_vectors import reaching, write_block_bounds
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.exponential import single_precision
from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.masks import NONE, ONE, lowest_bit
from lexshard.kernels.mass.reference import (
    BIN_WIDTH,
    BINS,
    CONFIDENCE,
    FARTHEST_DRAWN,
    HEAVY_SHARE,
    LARGEST_PLACE,
    MASS_MARGIN,
    MEMBER_MARGIN,
)
from lexshard.kernels.noise.cpu import noise_of
from lexshard.kernels.ordered_sums import total
from lexshard.kernels.penalties.cpu import MINUS_INFINITY, adjust_block
from lexshard.kernels.search.blocks import block_bounds, cover, slack_factors, upper_bounds
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key

CHUNK = 512  # tokens whose bounds are weighed at a time
# Tokens whose logits may be worth knowing are at least as good as so many blocks are at best: one
# of 16, but no fewer than this.
HEAVY_BLOCKS, FEWEST_HEAVY = 16, 64
MOST_OF_BLOCK = 16  # of them on average; the others have their bounds


@njit(nogil=True, cache=True)
def _lower_bounds(values, row_slack, factors, first, lower):  # type: ignore[no-untyped-def]
    """Writes the lower bounds ``lower`` [n] of the tokens from ``first`` on."""
    error, size, rest, share = factors
    stop = first + lower.size
    estimates = values[first:stop]
    errors = row_slack[0, first:stop]
    sizes = row_slack[1, first:stop]
    for i in range(lower.size):
        slack = error * errors[i] + size * sizes[i] + rest
        lower[i] = estimates[i] - (slack + abs(estimates[i]) * share)


@njit(nogil=True, cache=True)
def write_bounds(values, row_slack, hidden_slack, adjustments, row, side, bounds):  # type: ignore[no-untyped-def]
    """The adjusted bounds of a row from above (``side`` 0) or from below."""
    if side == 0:
        upper_bounds(values[row], row_slack, slack_factors(hidden_slack[row]), 0, bounds)
    else:
        _lower_bounds(values[row], row_slack, slack_factors(hidden_slack[row]), 0, bounds)
    if adjustments.active[row]:
        adjust_block(bounds, 0, row, adjustments)


@njit(nogil=True, cache=True)
def _log_sum(values, scale, weights):  # type: ignore[no-untyped-def]
    """Log-sum-exp of ``values * scale`` and the largest value."""
    largest = MINUS_INFINITY
    for index in range(values.size):
        largest = max(largest, values[index])
    top = np.float64(largest) * scale
    if math.isinf(top):
        return top, np.float64(largest)
    for index in range(values.size):
        weights[index] = exponential(np.float64(values[index]) * scale - top)
    total = 0.0
    for index in range(values.size):
        total += weights[index]
    return top + math.log(total), np.float64(largest)


@njit(nogil=True, cache=True)
def outside_mass(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, size, needs, adjustments, ids, offsets
):
    rows = values.shape[0]
    result = np.empty((3, rows), np.float64)
    bounds = np.empty(size, np.float32)
    weights = np.empty(size, np.float64)
    for row in range(rows):
        scale = needs.inverse_temperature[row]
        for side in range(2):
            write_bounds(values, row_slack, hidden_slack, adjustments, row, side, bounds)
            for index in range(offsets[row], offsets[row + 1]):
                bounds[ids[index]] = MINUS_INFINITY
            log_sum, largest = _log_sum(bounds, scale, weights)
            if side == 0:
                result[0, row] = log_sum + MASS_MARGIN
                result[2, row] = largest
            else:
                result[1, row] = log_sum - MASS_MARGIN
    return result


@njit(nogil=True, cache=True)
def _shares(one, other, least, scale, top, above, below):  # type: ignore[no-untyped-def]
    """What each token has, in shares of ``top``: ``above`` by its ``one`` bound if that reaches
    ``least``, else ``below`` by the ``other``."""
    for index in range(one.size):
        better = one[index] >= least
        bound = one[index] if better else other[index]
        share = np.float64(single_precision.exponential((bound - top) * scale))
        above[index] = share if better else 0.0
        below[index] = 0.0 if better else share


@njit(nogil=True, cache=True)
def ceilings_of(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, block_slack, adjustments, row, maxima
):
    """Per block of a row a bound on the upper bounds of its tokens, from ``maxima`` [V / 64] of the
    estimates that its mask holds."""
    factors, size = slack_factors(hidden_slack), row_slack.shape[1]
    ceilings = block_bounds(maxima, block_slack, factors)
    if adjustments.active[row]:
        cover(ceilings, values, row_slack, factors, size, row, adjustments)
    return ceilings


@njit(nogil=True, cache=True)
def _write_last_block(values, row_slack, factors, start, upper):  # type: ignore[no-untyped-def]
    own = upper[: row_slack.shape[1] - start]
    upper_bounds(values, row_slack, factors, start, own)
    upper[own.size :] = MINUS_INFINITY


@njit(nogil=True, cache=True, inline="always")
def write_upper(values, row_slack, factors, block, upper):  # type: ignore[no-untyped-def]
    """Writes the upper bounds ``upper`` [64] of a block, before adjustments: what has these takes
    thirty times as long, be they of no use."""
    start = block * BLOCK
    if start + BLOCK <= row_slack.shape[1]:
        write_block_bounds(values, row_slack, factors, start, upper)
    else:
        _write_last_block(values, row_slack, factors, start, upper)


@njit(nogil=True, cache=True)
def adjust_upper(upper, block, size, row, adjustments):  # type: ignore[no-untyped-def]
    """Makes upper bounds of a block of ``size`` tokens adjusted ones."""
    start = block * BLOCK
    adjust_block(upper[: min(BLOCK, size - start)], start, row, adjustments)


@njit(nogil=True, cache=True)
def _keep_above(edge, ids, bounds, count):  # type: ignore[no-untyped-def]
    """Moves the tokens whose bounds are above ``edge`` to the front; how many there are."""
    kept = 0
    for index in range(count):
        if bounds[index] > edge:
            ids[kept], bounds[kept] = ids[index], bounds[index]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def heaviest(values, row_slack, hidden_slack, adjustments, row, ceilings):  # type: ignore[no-untyped-def]
    """The tokens with the largest upper bounds, sorted by id: those from the best blocks' ceilings
    on, but no more than a share of the vocabulary."""
    factors, upper = slack_factors(hidden_slack), np.empty(BLOCK, np.float32)
    active, size = adjustments.active[row], row_slack.shape[1]
    most = size // HEAVY_SHARE
    blocks = min(most, max(FEWEST_HEAVY, ceilings.size // HEAVY_BLOCKS))
    keys = np.empty(ceilings.size, np.int64)
    for block in range(ceilings.size):
        keys[block] = order_key(ceilings[block])
    if blocks == 0:
        return np.empty(0, np.int32)
    edge = kth_largest_key(keys.copy(), ceilings.size, blocks) - 1  # larger ones are wanted
    room, count = MOST_OF_BLOCK * blocks, 0
    ids, bounds = np.empty(room, np.int32), np.empty(room, np.int64)
    for block in range(ceilings.size):
        if keys[block] <= edge or ceilings[block] == MINUS_INFINITY:
            continue
        write_upper(values, row_slack, factors, block, upper)
        if active:
            adjust_upper(upper, block, size, row, adjustments)
        places = reaching(upper, key_value(edge + 1))
        while places != NONE:
            offset = lowest_bit(places)
            places &= places - ONE
            key = order_key(upper[offset])
            if count == room:  # many are equal, or of few blocks
                edge = kth_largest_key(bounds.copy(), count, min(most, count))
                count = _keep_above(edge, ids, bounds, count)
            if key > edge and upper[offset] > MINUS_INFINITY:
                ids[count], bounds[count] = block * BLOCK + offset, key
                count += 1
    if count > most:
        edge = kth_largest_key(bounds[:count].copy(), count, most)
        count = _keep_above(edge, ids, bounds, count)
    return ids[:count].copy()


@njit(nogil=True, cache=True)
def _stands_by_few(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    hidden_slack,
    adjustments,
    row,
    scale,
    top_p,
    token,
    logit,
    top,
    ceilings,
    known,
    known_logits,
):
    """`stands`, inside, as far as the tokens ``known`` and blocks whose ceilings reach ``logit``
    tell: of all other tokens it is enough to know that they are no better."""
    better, others = 0.0, exponential(np.float64(logit - top) * scale)
    for index in range(known.size):
        if known[index] != token:
            mass = exponential(np.float64(known_logits[index] - top) * scale)
            if known_logits[index] >= logit:
                better += mass
            else:
                others += mass
    factors, upper, place = slack_factors(hidden_slack), np.empty(BLOCK, np.float32), 0
    active, size, share = adjustments.active[row], row_slack.shape[1], top_p - MEMBER_MARGIN
    for block in range(ceilings.size):
        if ceilings[block] < logit:
            continue
        if not better < share * (better + others):
            return False
        write_upper(values, row_slack, factors, block, upper)
        if active:
            adjust_upper(upper, block, size, row, adjustments)
        start = block * BLOCK
        while place < known.size and known[place] < start + BLOCK:
            if known[place] >= start:
                upper[known[place] - start] = MINUS_INFINITY
            place += 1
        if start <= token < start + BLOCK:
            upper[token - start] = MINUS_INFINITY
        places = reaching(upper, logit)
        while places != NONE:
            offset = lowest_bit(places)
            places &= places - ONE
            better += exponential(np.float64(upper[offset] - top) * scale)
    return better < share * (better + others)


@njit(nogil=True, cache=True)
def stands(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    hidden_slack,
    adjustments,
    row,
    scale,
    top_p,
    token,
    logit,
    largest,
    ceilings,
    known,
    known_logits,
    inside,
):
    """Whether ``token``, whose adjusted logit is known, is certainly ``inside`` of the nucleus, or
    certainly outside: no upper bound is above ``largest``, none in a block above its ceiling of
    ``ceilings`` [V / 64], and both bounds of the tokens ``known`` [K] are their logits."""
    top = np.float32(max(logit, np.float32(largest)))
    distance = np.float64(logit - top) * scale
    if not distance >= -FARTHEST_DRAWN:
        return False
    bounds = (values, row_slack, hidden_slack, adjustments, row, scale, top_p, token, logit, top)
    if inside and _stands_by_few(*bounds, ceilings, known, known_logits):
        return True
    factors = slack_factors(hidden_slack)
    bounds, shares = np.empty((2, CHUNK), np.float32), np.empty((2, CHUNK))
    # Outside: what is certainly better has at least, all others have at most.
    least = logit if inside else np.nextafter(logit, np.float32(np.inf))
    place = 0
    better = 0.0
    others = exponential(distance)
    for first in range(0, row_slack.shape[1], CHUNK):
        count = min(CHUNK, row_slack.shape[1] - first)
        upper, lower = bounds[0, :count], bounds[1, :count]
        above, below = shares[0, :count], shares[1, :count]
        upper_bounds(values, row_slack, factors, first, upper)
        _lower_bounds(values, row_slack, factors, first, lower)
        if adjustments.active[row]:
            adjust_block(upper, first, row, adjustments)
            adjust_block(lower, first, row, adjustments)
        while place < known.size and known[place] < first + count:
            upper[known[place] - first] = known_logits[place]
            lower[known[place] - first] = known_logits[place]
            place += 1
        one, other = (upper, lower) if inside else (lower, upper)
        _shares(one, other, least, np.float32(scale), top, above, below)
        if first <= token < first + count:
            above[token - first] = 0.0
            below[token - first] = 0.0
        better += total(above)
        others += total(below)
    if inside:
        return better < (top_p - MEMBER_MARGIN) * (better + others)
    return better > (top_p + MEMBER_MARGIN) * (better + others)


@njit(nogil=True, cache=True)
def drawn(ids, logits, key, position, scale):  # type: ignore[no-untyped-def]
    """Which of the tokens ``ids`` [n] of adjusted ``logits`` [n] is drawn, -1 if all are
    excluded."""
    winner = -1
    highest = -np.inf
    for index in range(ids.size):
        score = np.float64(logits[index]) * scale + np.float64(noise_of(key, position, ids[index]))
        if score > highest:
            winner, highest = index, score
    return winner


@njit(nogil=True, cache=True)
def _outline(values, row_slack, hidden_slack, scale, counts, errors):  # type: ignore[no-untyped-def]
    """Tallies tokens and their uncertainty by bins below the best estimate's.

    Returns the best one's bin (None of them where that is -LARGEST_PLACE), whether bins mean
    anything, the last bin below it that has tokens, and the largest slack in bins.
    """
    error, size, rest, _ = slack_factors(hidden_slack)
    counts[:] = 0
    errors[:] = 0.0
    factor = scale / BIN_WIDTH
    top = MINUS_INFINITY
    for index in range(values.size):
        top = max(top, values[index])
    if top == MINUS_INFINITY:
        return -LARGEST_PLACE, True, -1, 0.0
    if not abs(np.float64(top) * factor) < LARGEST_PLACE:
        return -LARGEST_PLACE, False, -1, 0.0
    first = np.int64(math.floor(np.float64(top) * factor))
    widest = 0.0
    last = 0
    for index in range(values.size):
        place = np.float64(values[index]) * factor
        if place > first - BINS:
            below = first - np.int64(math.floor(place))
            if below < BINS:
                slack = np.float64(error * row_slack[0, index] + size * row_slack[1, index] + rest)
                counts[below] += 1
                errors[below] += slack * scale
                widest = max(widest, slack)
                last = max(last, below)
    return first, True, last, widest * factor


@njit(nogil=True, cache=True)
def outline_row(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, size, scale, adjustments, row, counts, errors
):
    work = values[row, :size].copy()
    if adjustments.active[row]:
        adjust_block(work, 0, row, adjustments)
    return _outline(work, row_slack, hidden_slack[row], scale, counts, errors)


@njit(nogil=True, cache=True)
def plan_nucleus(counts, errors, widest, top_p):  # type: ignore[no-untyped-def]
    total = 0.0
    left = 0.0
    for place in range(BINS):
        weight = exponential(-(place + 0.5) * BIN_WIDTH)
        total += counts[place] * weight
        left += errors[place] * weight
    edge = 0
    inside = counts[0] * exponential(-0.5 * BIN_WIDTH)
    while inside < top_p * total and edge < BINS - 1:
        edge += 1
        inside += counts[edge] * exponential(-(edge + 0.5) * BIN_WIDTH)
    room = CONFIDENCE * exponential(-(edge + 0.5) * BIN_WIDTH)
    for place in range(BINS):
        left -= errors[place] * exponential(-(place + 0.5) * BIN_WIDTH)
        if place > edge + 2.0 * widest + 1.0 and 2.0 * left < room:
            return place
    return BINS - 1


@njit(nogil=True, cache=True)
def plan_epsilon(counts, errors, epsilon):  # type: ignore[no-untyped-def]
    total = 0.0
    uncertain = 0.0
    for place in range(BINS):
        weight = exponential(-(place + 0.5) * BIN_WIDTH)
        total += counts[place] * weight
        uncertain += errors[place] * weight
    left = total
    for place in range(BINS):
        weight = exponential(-(place + 0.5) * BIN_WIDTH)
        left -= counts[place] * weight
        uncertain -= errors[place] * weight
        if left + uncertain < 0.9 * epsilon * total:
            return place
    return BINS - 1
