"""Enumerative coding as its definition says, with exact binomials and plain bisection."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rank(members: Sequence[int]) -> int:
    """The sum of C(members[i], i + 1): the place of a subset among all of its size, those that
    differ in the larger members last (colexicographic order)."""
    return sum(math.comb(member, size) for size, member in enumerate(members, 1))


def subset(place: int, size: int, universe: int) -> list[int]:
    """The subset of ``size`` members below ``universe`` whose `rank` is ``place``."""
    members: list[int] = []
    end = universe
    for left in range(size, 0, -1):
        low, high = left - 1, end  # C(low, left) <= place < C(high, left)
        while high - low > 1:
            middle = (low + high) // 2
            if math.comb(middle, left) <= place:
                low = middle
            else:
                high = middle
        place -= math.comb(low, left)
        members.append(low)
        end = low
    return members[::-1]
