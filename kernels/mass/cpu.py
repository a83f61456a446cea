"""Masses in numba: one pass over a row of bounds per side, exponentials vectorised."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.mass.reference import (
    BIN_WIDTH,
    BINS,
    CONFIDENCE,
    LARGEST_PLACE,
    MASS_MARGIN,
)
from lexshard.kernels.penalties.cpu import MINUS_INFINITY, adjust_block
from lexshard.kernels.search.blocks import slack_factors, upper_bounds


@njit(nogil=True, cache=True)
def _lower_bounds(values, row_slack, hidden_slack, lower):  # type: ignore[no-untyped-def]
    error, size, rest, share = slack_factors(hidden_slack)
    errors = row_slack[0]
    sizes = row_slack[1]
    for i in range(lower.size):
        slack = error * errors[i] + size * sizes[i] + rest
        lower[i] = values[i] - (slack + abs(values[i]) * share)


@njit(nogil=True, cache=True)
def write_bounds(values, row_slack, hidden_slack, adjustments, row, side, bounds):  # type: ignore[no-untyped-def]
    """The adjusted bounds of a row from above (``side`` 0) or from below."""
    if side == 0:
        upper_bounds(values[row], row_slack, slack_factors(hidden_slack[row]), 0, bounds)
    else:
        _lower_bounds(values[row], row_slack, hidden_slack[row], bounds)
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
