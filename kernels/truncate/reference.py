"""Truncation, stated plainly: sort everything, then cut."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential.double_precision import exponential_array

MASS_UNIT = 2.0**42


def best_ids(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    return np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))[:count]


def truncate(
    logits: npt.NDArray[np.float32],
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
) -> npt.NDArray[np.bool_]:
    order = best_ids(logits, len(logits))
    order = order[logits[order] > -np.inf]
    keep = np.zeros(len(logits), np.bool_)
    if not len(order):
        return keep
    scaled = logits[order].astype(np.float64) * inverse_temperature
    if log_min_p > -np.inf:
        order = order[scaled >= scaled[0] + log_min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        scaled = logits[order].astype(np.float64) * inverse_temperature
        with np.errstate(invalid="ignore"):  # inf - inf, where the answer is 0
            distance = np.where(scaled == scaled[0], 0.0, scaled - scaled[0])
        masses = np.rint(exponential_array(distance) * MASS_UNIT).astype(np.int64)
        sums = np.cumsum(masses)
        total = int(sums[-1])
        target = min(max(math.ceil(top_p * float(total)), 1), total)
        order = order[: int(np.searchsorted(sums, target)) + 1]
    keep[order] = True
    return keep
