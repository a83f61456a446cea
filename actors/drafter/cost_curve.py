"""What something takes by its size, learnt while it is done."""

from __future__ import annotations

from bisect import bisect_left, insort

# How much an observation counts for its own size and for all of them, and how far one may stand
# out: a pause is no news of the work.
OWN_WEIGHT, COMMON_WEIGHT, OUTLIER = 1 / 32, 1 / 8, 3.0


class CostCurve:
    """Seconds by size: what was measured at every size that was seen, straight lines in between.

    What makes one size slower (longer contexts, a busy machine) mostly makes all of them slower: a
    factor common to all follows every observation, so that sizes that were not seen lately do not
    look cheap. Below the smallest size it is taken to cost what that does, above the largest to
    grow in proportion.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._factor = 1.0

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def observe(self, size: int, seconds: float) -> None:
        known = self._seconds.get(size)
        if known is None:
            insort(self._sizes, size)
            self._seconds[size] = seconds / self._factor
            return
        excess = min(seconds / (known * self._factor), OUTLIER) - 1.0
        self._factor *= 1.0 + COMMON_WEIGHT * excess
        self._seconds[size] = known * (1.0 + OWN_WEIGHT * excess)

    def estimate(self, size: int) -> float:
        """Raises IndexError before anything was observed."""
        return self._factor * self._known_or_between(size)

    def _known_or_between(self, size: int) -> float:
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
