"""Time for a whole run and for each of its parts, so that a run ends when it promised to."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """``seconds`` from now on; parts of it end no later than the whole."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end, 0 when it has passed."""
        return max(0.0, self._end - self._clock())

    @property
    def spent(self) -> bool:
        return self.left == 0.0

    def part(self, seconds: float) -> Budget:
        """A budget of at most ``seconds`` inside this one."""
        return Budget(min(seconds, self.left), self._clock)
