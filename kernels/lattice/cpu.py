"""Enumerative coding whose decoder knows by logarithms nearly where each member is.

Binomials of hundreds of digits cost microseconds each; bisection takes eighteen of them a member.
A logarithm tells the member to within one or two, and the next binomial is a product away.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit


def subset(place: int, size: int, universe: int) -> list[int]:
    """See `kernels.lattice.reference`."""
    members: list[int] = []
    end = universe
    for left in range(size, 0, -1):
        member, chosen = _largest(place, left, end)
        place -= chosen
        members.append(member)
        end = member
    return members[::-1]


def _largest(place: int, size: int, end: int) -> tuple[int, int]:
    """The largest member below ``end`` with C(member, size) <= place, and that binomial."""
    if place == 0:
        return size - 1, 0
    if size == 1:
        return place, place
    member = int(_estimate(math.log(place), size, end))
    found = math.comb(member, size)
    while found > place:
        found = found * (member - size) // member
        member -= 1
    while member + 1 < end:
        larger = found * (member + 1) // (member + 1 - size)
        if larger > place:
            break
        member, found = member + 1, larger
    return member, found


@njit(nogil=True, cache=True)
def _estimate(log_place, size, end):  # type: ignore[no-untyped-def]
    """Where ln C(n, size) is ``log_place``, for n from ``size`` to ``end``, by bisection."""
    constant = math.lgamma(size + 1.0)
    low, high = np.int64(size), np.int64(end)
    while high - low > 1:
        middle = (low + high) // 2
        logarithm = math.lgamma(middle + 1.0) - math.lgamma(middle - size + 1.0) - constant
        if logarithm <= log_place:
            low = middle
        else:
            high = middle
    return low
