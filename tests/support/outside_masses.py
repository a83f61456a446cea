"""The mass of clusters of which no more than bounds is known, for tests of certificates."""

from __future__ import annotations

import math

import numpy as np


def outside_log_mass(upper: np.ndarray, sizes: np.ndarray, scale: float) -> float:
    """``log sum_c |c| exp(U_c s)`` of clusters with ``upper`` [C] bounds and ``sizes`` [C] rows,
    rounded up by far more than float64 can be off; ``-inf`` where there are none."""
    some = sizes > 0
    terms = np.log(sizes[some]) + upper[some].astype(np.float64) * scale
    value = float(np.logaddexp.reduce(terms, initial=-math.inf))
    return value + 1e-12 * (1.0 + abs(value)) if math.isfinite(value) else value
