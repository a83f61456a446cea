"""The certificates in numba: linear time, nothing sorted."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.certify.reference import (
    HALF_A_UNIT,
    LARGEST_RATIO,
    LOG_ROUNDING,
    MASS_ROUNDING,
    SUM_ROUNDING,
    TERM_ROUNDING,
)
from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.search.selection import key_value, order_key
from lexshard.kernels.truncate.cpu import boundary_key, largest, target_mass
from lexshard.kernels.truncate.reference import MASS_UNIT


@njit(nogil=True, cache=True)
def _log_sum_exp(terms, count):  # type: ignore[no-untyped-def]
    """The log-sum-exp of ``terms[:count]``, and what it may err by."""
    top = -np.inf
    for index in range(count):
        top = max(top, terms[index])
    if math.isinf(top):
        return top, 0.0
    for index in range(count):
        terms[index] = exponential(terms[index] - top)
    total = 0.0
    for index in range(count):
        total += terms[index]
    slack = TERM_ROUNDING + count * SUM_ROUNDING + (abs(top) + 1.0) * LOG_ROUNDING
    return top + math.log(total), slack


@njit(nogil=True, cache=True)
def known_log_mass(known, scale):  # type: ignore[no-untyped-def]
    terms = np.empty(known.size, np.float64)
    for index in range(known.size):
        terms[index] = np.float64(known[index]) * scale
    value, slack = _log_sum_exp(terms, known.size)
    return value - slack


@njit(nogil=True, cache=True)
def _size_of_mass(keys, masses, count, target):  # type: ignore[no-untyped-def]
    """How many best tokens hold ``target``, and the key of the last of them."""
    boundary, mass, above = boundary_key(keys[:count].copy(), masses[:count].copy(), count, target)
    size = (target - above + mass - 1) // mass
    for index in range(count):
        size += keys[index] > boundary
    return size, boundary


@njit(nogil=True, cache=True)
def nucleus_size(  # type: ignore[no-untyped-def]
    known, scale, top_p, outside_log_upper, outside_log_lower, outside_upper, outside_count
):
    highest = largest(known)
    if highest == MINUS_INFINITY:
        return -1
    top = np.float64(highest) * scale
    keys = np.empty(known.size, np.int64)
    masses = np.empty(known.size, np.int64)
    count = 0
    total = 0
    for index in range(known.size):
        scaled = np.float64(known[index]) * scale
        distance = 0.0 if scaled == top else scaled - top
        mass = np.int64(np.rint(exponential(distance) * MASS_UNIT))
        if mass > 0:
            keys[count] = order_key(known[index])
            masses[count] = mass
            total += mass
            count += 1
    low = 0
    high = 0
    if outside_log_upper > -np.inf:
        if not outside_log_upper - top < LARGEST_RATIO:
            return -1
        rounding = HALF_A_UNIT * outside_count
        most = math.exp(outside_log_upper - top) * (1.0 + MASS_ROUNDING) * MASS_UNIT
        high = np.int64(math.ceil(most + rounding)) + 1
        if outside_log_lower > -np.inf:
            least = math.exp(min(outside_log_lower - top, LARGEST_RATIO)) * (1.0 - MASS_ROUNDING)
            low = max(np.int64(math.floor(least * MASS_UNIT - rounding)) - 1, 0)
            low = min(low, high)
    most_wanted = target_mass(top_p, total + high)
    if most_wanted > total:
        return -1
    size, boundary = _size_of_mass(keys, masses, count, most_wanted)
    if not outside_upper < np.float64(key_value(boundary)):
        return -1
    least_wanted = target_mass(top_p, total + low)
    return size if _size_of_mass(keys, masses, count, least_wanted)[0] == size else -1
