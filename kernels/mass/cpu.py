"""Masses in numba: one pass over a row of bounds per side, exponentials vectorised."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.exponential.double_precision import exponential
from kernels.mass.reference import BIN_WIDTH, BINS, CONFIDENCE, MASS_MARGIN
from kernels.mass.types import OutsideMass
from kernels.penalties import Adjustments
from kernels.penalties.cpu import MINUS_INFINITY, adjust_block
from kernels.search import Estimates, Needs
from kernels.search.blocks import slack_factors, upper_bounds


@njit(nogil=True, cache=True)
def _lower_bounds(values, row_slack, hidden_slack, lower):  # type: ignore[no-untyped-def]
    error, size, rest, share = slack_factors(hidden_slack)
    errors = row_slack[0]
    sizes = row_slack[1]
    for i in range(lower.size):
        slack = error * errors[i] + size * sizes[i] + rest
        lower[i] = values[i] - (slack + abs(values[i]) * share)


@njit(nogil=True, cache=True)
def _write_bounds(values, row_slack, hidden_slack, adjustments, row, side, bounds):  # type: ignore[no-untyped-def]
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
def _outside_mass(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, size, needs, adjustments, ids, offsets
):
    rows = values.shape[0]
    result = np.empty((3, rows), np.float64)
    bounds = np.empty(size, np.float32)
    weights = np.empty(size, np.float64)
    for row in range(rows):
        scale = needs.inverse_temperature[row]
        for side in range(2):
            _write_bounds(values, row_slack, hidden_slack, adjustments, row, side, bounds)
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
def _weigh(values, row_slack, hidden_slack, scale, counts, masses, errors):  # type: ignore[no-untyped-def]
    """Tallies tokens, masses and their uncertainty by distance from the best estimate.

    Returns the largest slack that occurs among tokens that matter, in bins.
    """
    error, size, rest, _ = slack_factors(hidden_slack)
    counts[:] = 0
    masses[:] = 0.0
    errors[:] = 0.0
    top = MINUS_INFINITY
    for index in range(values.size):
        top = max(top, values[index])
    if top == MINUS_INFINITY:
        return 0.0
    widest = 0.0
    for index in range(values.size):
        distance = np.float64(top - values[index]) * scale
        if distance < BINS * BIN_WIDTH:
            place = np.int64(distance / BIN_WIDTH)
            slack = np.float64(error * row_slack[0, index] + size * row_slack[1, index] + rest)
            counts[place] += 1
            errors[place] += slack * scale
            widest = max(widest, slack)
    for place in range(BINS):
        weight = exponential(-(place + 0.5) * BIN_WIDTH)
        masses[place] = counts[place] * weight
        errors[place] *= weight
    return widest * scale / BIN_WIDTH


@njit(nogil=True, cache=True)
def _plan_nucleus(counts, masses, errors, widest, top_p):  # type: ignore[no-untyped-def]
    total = masses.sum()
    edge = 0
    inside = masses[0]
    while inside < top_p * total and edge < BINS - 1:
        edge += 1
        inside += masses[edge]
    room = CONFIDENCE * exponential(-(edge + 0.5) * BIN_WIDTH)
    left = errors.sum()
    count = 0
    for place in range(BINS):
        count += counts[place]
        left -= errors[place]
        if place > edge + 2.0 * widest + 1.0 and 2.0 * left < room:
            return count
    return count


@njit(nogil=True, cache=True)
def _plan_epsilon(counts, masses, errors, epsilon):  # type: ignore[no-untyped-def]
    total = masses.sum()
    left = total
    uncertain = errors.sum()
    count = 0
    for place in range(BINS):
        count += counts[place]
        left -= masses[place]
        uncertain -= errors[place]
        if left + uncertain < 0.9 * epsilon * total:
            return count
    return count


@njit(nogil=True, cache=True)
def _plan(  # type: ignore[no-untyped-def]
    values, row_slack, hidden_slack, size, needs, adjustments, top_p, epsilon
):
    rows = values.shape[0]
    result = np.empty(rows, np.int64)
    counts = np.empty(BINS, np.int64)
    masses = np.empty(BINS, np.float64)
    errors = np.empty(BINS, np.float64)
    work = np.empty(size, np.float32)
    for row in range(rows):
        work[:] = values[row, :size]
        if adjustments.active[row]:
            adjust_block(work, 0, row, adjustments)
        scale = needs.inverse_temperature[row]
        widest = _weigh(work, row_slack, hidden_slack[row], scale, counts, masses, errors)
        if epsilon[row] > 0.0:
            result[row] = _plan_epsilon(counts, masses, errors, epsilon[row])
        else:
            result[row] = _plan_nucleus(counts, masses, errors, widest, top_p[row])
    return result


def adjusted_bounds(
    estimates: Estimates, vocabulary_size: int, adjustments: Adjustments
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    lower, upper = (np.empty(vocabulary_size, np.float32) for _ in range(2))
    bounds = (estimates.values, estimates.row_slack, estimates.hidden_slack, adjustments, 0)
    _write_bounds(*bounds, 1, lower)
    _write_bounds(*bounds, 0, upper)
    return lower, upper


def outside_mass(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> OutsideMass:
    bounds = (estimates.values, estimates.row_slack, estimates.hidden_slack)
    return OutsideMass(*_outside_mass(*bounds, vocabulary_size, needs, adjustments, ids, offsets))


def plan(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    top_p: npt.NDArray[np.float64],
    epsilon: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    bounds = (estimates.values, estimates.row_slack, estimates.hidden_slack)
    return _plan(*bounds, vocabulary_size, needs, adjustments, top_p, epsilon)
