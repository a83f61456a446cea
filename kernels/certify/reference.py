"""The certificates, stated plainly in float64 numpy and Python integers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential.double_precision import exponential_array
from lexshard.kernels.truncate.reference import MASS_UNIT, best_ids

# One exponential and the rounding of its argument, which is at most 750 from the largest.
TERM_ROUNDING = 2e-13
# The rounding of a sum, per term added.
SUM_ROUNDING = 2.0**-52
# The rounding of what exponentials are taken relative to, and of the last addition.
LOG_ROUNDING = 2.0**-50
# Integer masses against real ones: an exponential and the rounding of its argument, relative.
MASS_ROUNDING = 1e-12
# An integer mass is rounded by at most this, in its own unit.
HALF_A_UNIT = 0.5
# With more than e**13 times the mass of the best token outside, no set is certified (and integer
# masses would not fit 63 bits).
LARGEST_RATIO = 13.0
# `kernels.truncate` holds for vocabularies below this.
LARGEST_VOCABULARY = 1 << 20


def log_sum_exp(terms: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The log-sum-exp and what it may err by."""
    top = float(terms.max(initial=-math.inf))
    if math.isinf(top):
        return top, 0.0
    slack = TERM_ROUNDING + len(terms) * SUM_ROUNDING + (abs(top) + 1.0) * LOG_ROUNDING
    return top + math.log(float(np.exp(terms - top).sum())), slack


def known_log_mass(known: npt.NDArray[np.float32], inverse_temperature: float) -> float:
    value, slack = log_sum_exp(known.astype(np.float64) * inverse_temperature)
    return value - slack


def nucleus_size(
    known: npt.NDArray[np.float32],
    inverse_temperature: float,
    top_p: float,
    outside_log_upper: float,
    outside_log_lower: float,
    outside_upper: float,
    outside_count: int,
) -> int:
    order = best_ids(known, len(known))
    order = order[known[order] > -np.inf]
    if not len(order):
        return -1
    scaled = known[order].astype(np.float64) * inverse_temperature
    top = float(scaled[0])
    with np.errstate(invalid="ignore"):  # inf - inf, where the answer is 0
        distance = np.where(scaled == top, 0.0, scaled - top)
    masses = np.rint(exponential_array(distance) * MASS_UNIT).astype(np.int64)
    sums = np.cumsum(masses)
    low, high = 0, 0
    if outside_log_upper > -math.inf:
        if not outside_log_upper - top < LARGEST_RATIO:
            return -1
        rounding = HALF_A_UNIT * outside_count
        most = math.exp(outside_log_upper - top) * (1.0 + MASS_ROUNDING) * MASS_UNIT
        high = math.ceil(most + rounding) + 1
        if outside_log_lower > -math.inf:
            least = math.exp(min(outside_log_lower - top, LARGEST_RATIO)) * (1.0 - MASS_ROUNDING)
            low = min(max(math.floor(least * MASS_UNIT - rounding) - 1, 0), high)
    sizes = []
    for outside in (low, high):
        total = int(sums[-1]) + outside
        target = min(max(math.ceil(top_p * float(total)), 1), total)
        if target > sums[-1]:
            return -1
        sizes.append(int(np.searchsorted(sums, target)) + 1)
    if sizes[0] != sizes[1] or not outside_upper < known[order[sizes[0] - 1]]:
        return -1
    return sizes[0]
