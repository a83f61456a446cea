"""What something takes by its size, learnt while it is done."""

from __future__ import annotations

from bisect import bisect_left, insort

# How much a new observation counts, and how far one may stand out: a pause is no news of the work.
WEIGHT, OUTLIER = 1 / 8, 3.0


class CostCurve:
    """Seconds by size: a sliding mean at every size that was seen, straight lines in between.

    Below the smallest size it is taken to cost what that does, above the largest to grow in
    proportion.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def observe(self, size: int, seconds: float) -> None:
        known = self._seconds.get(size)
        if known is None:
            insort(self._sizes, size)
            self._seconds[size] = seconds
        else:
            self._seconds[size] = known + WEIGHT * (min(seconds, OUTLIER * known) - known)

    def estimate(self, size: int) -> float:
        """Raises IndexError before anything was observed."""
        known = self._seconds.get(size)
        if known is not None:
            return known
        place = bisect_left(self._sizes, size)
        if place == 0:
            return self._seconds[self._sizes[0]]
        before = self._sizes[place - 1]
        if place == len(self._sizes):
            return self._seconds[before] * size / before
        after = self._sizes[place]
        share = (size - before) / (after - before)
        return (1 - share) * self._seconds[before] + share * self._seconds[after]
