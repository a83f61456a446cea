"""Masses in numba: one pass over a row of bounds per side, exponentials vectorised."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.exponential import single_precision
from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.mass.reference import (
    BIN_WIDTH,
    BINS,
    CONFIDENCE,
    FARTHEST_DRAWN,
    LARGEST_PLACE,
    MASS_MARGIN,
    MEMBER_MARGIN,
)
from lexshard.kernels.noise.cpu import noise_of
from lexshard.kernels.ordered_sums import total
from lexshard.kernels.penalties.cpu import MINUS_INFINITY, adjust_block
from lexshard.kernels.search.blocks import slack_factors, upper_bounds

CHUNK = 512  # tokens whose bounds are weighed at a time
# Of tokens whose logits may be worth knowing: in logits times s below the largest bound.
HEAVY_BIN, HEAVY_BINS = 1.0 / 8.0, 128


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
def heaviest(values, row_slack, hidden_slack, adjustments, row, scale, largest, most):  # type: ignore[no-untyped-def]
    """The tokens with the largest upper bounds, none of which is above ``largest``, sorted by id:
    as many bins of them as hold up to ``most``."""
    factors = slack_factors(hidden_slack)
    size = row_slack.shape[1]
    if not math.isfinite(largest):
        return np.empty(0, np.int32)
    factor = np.float32(scale / HEAVY_BIN)
    top = np.float32(largest)
    bins = np.empty(size, np.uint8)
    upper = np.empty(CHUNK, np.float32)
    for first in range(0, size, CHUNK):
        own = upper[: min(CHUNK, size - first)]
        upper_bounds(values, row_slack, factors, first, own)
        if adjustments.active[row]:
            adjust_block(own, first, row, adjustments)
        for index in range(own.size):
            below = (top - own[index]) * factor
            bins[first + index] = np.uint8(min(below, np.float32(HEAVY_BINS)))
    counts = np.zeros(HEAVY_BINS + 1, np.int64)
    for index in range(size):
        counts[bins[index]] += 1
    total, end = 0, 0
    while end < HEAVY_BINS and total + counts[end] <= most:
        total += counts[end]
        end += 1
    ids = np.empty(total, np.int32)
    count = 0
    for index in range(size):
        if bins[index] < end:
            ids[count] = index
            count += 1
    return ids


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
    known,
    known_logits,
    inside,
):
    """Whether ``token``, whose adjusted logit is known, is certainly ``inside`` of the nucleus, or
    certainly outside: no upper bound is above ``largest``, and both bounds of the tokens ``known``
    [K] are their logits."""
    top = np.float32(max(logit, np.float32(largest)))
    distance = np.float64(logit - top) * scale
    if not distance >= -FARTHEST_DRAWN:
        return False
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
