"""What something takes by its size, learnt while it is done."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

# How much an observation counts for all sizes, and how far one may stand out: a pause is no news of
# the work. For its own size it counts as one among those that are known.
COMMON_WEIGHT, OUTLIER = 1 / 8, 3.0
# What is left of what is known of a size after an observation of any size, and the most that is
# known of one, in observations.
KEPT, MOST_KNOWN = 0.995, 31.0


@dataclass(slots=True)
class _Known:
    """``seconds`` of one size, by ``weight`` observations as of number ``seen``."""

    seconds: float
    weight: float
    seen: int


class CostCurve:
    """Seconds by size: what was measured at every size that was seen, straight lines in between.

    What makes one size slower (longer contexts, a busy machine) mostly makes all of them slower: a
    factor common to all follows every observation, so that sizes that were not seen lately do not
    look cheap. More never costs less: where a smaller size looks dearer than a larger one, both
    are taken to cost their average, in which what was seen often and lately counts most (isotonic
    regression). Below the smallest size it is taken to cost what that does, above the largest to
    grow in proportion.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._known: dict[int, _Known] = {}
        self._factor = 1.0
        self._count = 0
        self._levels: dict[int, float] = {}  # by size; empty where they must be found again

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def observe(self, size: int, seconds: float, times: int = 1) -> None:
        """It took so many seconds, on average of so many times."""
        self._levels = {}
        self._count += 1
        known = self._known.get(size)
        if known is None:
            insort(self._sizes, size)
            self._known[size] = _Known(seconds / self._factor, times, self._count)
            return
        excess = min(seconds / (known.seconds * self._factor), OUTLIER) - 1.0
        self._factor *= 1.0 + COMMON_WEIGHT * excess
        weight = self._weight(known)
        known.seconds *= 1.0 + excess * times / (weight + times)
        known.weight = min(weight + times, MOST_KNOWN)
        known.seen = self._count

    def estimate(self, size: int) -> float:
        """Raises IndexError before anything was observed."""
        if not self._levels:
            self._levels = self._isotonic()
        return self._factor * self._level(size)

    def _weight(self, known: _Known) -> float:
        return known.weight * KEPT ** (self._count - known.seen)

    def _isotonic(self) -> dict[int, float]:
        """The seconds that do not fall with the size and are nearest to what is known, by weighted
        squares (pool adjacent violators)."""
        groups: list[tuple[float, float, int]] = []  # seconds, weight, sizes
        for size in self._sizes:
            known = self._known[size]
            seconds, weight, count = known.seconds, self._weight(known), 1
            while groups and groups[-1][0] > seconds:
                before, own, sizes = groups.pop()
                seconds = (before * own + seconds * weight) / (own + weight)
                weight, count = own + weight, sizes + count
            groups.append((seconds, weight, count))
        levels = [seconds for seconds, _, count in groups for _ in range(count)]
        return dict(zip(self._sizes, levels, strict=True))

    def _level(self, size: int) -> float:
        level = self._levels.get(size)
        if level is not None:
            return level
        place = bisect_left(self._sizes, size)
        if place == 0:
            return self._levels[self._sizes[0]]
        before = self._sizes[place - 1]
        if place == len(self._sizes):
            return self._levels[before] * size / before
        after = self._sizes[place]
        share = (size - before) / (after - before)
        return (1 - share) * self._levels[before] + share * self._levels[after]
