"""An exponential in float64 made of additions and multiplications only.

Library exponentials differ in their last bit between numpy, libm and GPUs, and do not vectorise
in numba. This one does, and gives the same bits everywhere: ``exp(x) = 2**n p(r)`` with ``n`` the
nearest integer to ``x / ln 2``, ``r = x - n ln 2`` in two steps, and ``p`` the Taylor polynomial of
degree 13 by Horner's rule (relative error below 1e-15 for ``x <= 0``; 0 below -700).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

INVERSE_LN2 = 1.4426950408889634
# ln 2 with its last 21 bits zero, so that n times it is exact, and the rest.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
# Adding this rounds to an integer, which then stands in the low bits.
ROUNDER = 1.5 * 2.0**52
ROUNDER_BITS = int(np.float64(ROUNDER).view(np.int64))
SMALLEST = -700.0
COEFFICIENTS = tuple(1.0 / math.factorial(degree) for degree in range(14))
C0, C1, C2, C3, C4, C5, C6, C7, C8, C9, C10, C11, C12, C13 = COEFFICIENTS


@njit(nogil=True, cache=True, inline="always")
def exponential(x):  # type: ignore[no-untyped-def]
    """exp of one float64 ``x <= 0`` (``-inf`` gives 0)."""
    clamped = x if x > SMALLEST else SMALLEST
    rounded = clamped * INVERSE_LN2 + ROUNDER
    n = rounded - ROUNDER
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    p = C13
    p = p * r + C12
    p = p * r + C11
    p = p * r + C10
    p = p * r + C9
    p = p * r + C8
    p = p * r + C7
    p = p * r + C6
    p = p * r + C5
    p = p * r + C4
    p = p * r + C3
    p = p * r + C2
    p = p * r + C1
    p = p * r + C0
    power = np.int64((np.float64(rounded).view(np.int64) - ROUNDER_BITS + 1023) << 52)
    return p * power.view(np.float64) if x > SMALLEST else 0.0


def exponential_array(x: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """The same operations in numpy."""
    clamped = np.maximum(x, SMALLEST)
    rounded = clamped * INVERSE_LN2 + ROUNDER
    n = rounded - ROUNDER
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    p = np.full_like(r, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        p = p * r + coefficient
    power = ((rounded.view(np.int64) - ROUNDER_BITS + 1023) << 52).view(np.float64)
    return np.where(x > SMALLEST, p * power, 0.0)
