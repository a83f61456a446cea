"""The log normaliser in numba: exponentials eight or more at a time, then one ordered sum."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.exponential.double_precision import exponential


@njit(nogil=True, cache=True)
def _log_normalizer(logits):  # type: ignore[no-untyped-def]
    largest = logits[0]
    for index in range(1, logits.size):
        largest = max(largest, logits[index])
    top = np.float64(largest)
    if math.isinf(top):
        return top
    weights = np.empty(logits.size, np.float64)
    for index in range(logits.size):
        weights[index] = exponential(np.float64(logits[index]) - top)
    total = 0.0
    for index in range(logits.size):
        total += weights[index]
    return top + math.log(total)


def log_normalizer(logits: npt.NDArray[np.float32]) -> float:
    return float(_log_normalizer(logits))
