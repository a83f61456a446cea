"""Is the engine at work, although it says nothing?"""

from __future__ import annotations

import time
from collections import deque

import psutil

QUIET_SECONDS = 2.5  # idle or busy, an engine speaks every second, but for the length of a step
LEAST_LOAD = 0.05  # of a core: a long step takes a whole one, a stopped process nothing
LONGEST_LOOK_SECONDS = 1.0  # between two looks: what is beyond, the looking process did not run


class Pulse:
    """An engine process that is to be heard regularly. ``heard`` and ``look`` in one thread."""

    def __init__(self, process_id: int) -> None:
        self._process = psutil.Process(process_id)
        self._last_heard = self._last_at_work = self._last_look = time.monotonic()
        self._looks: deque[tuple[float, float]] = deque(maxlen=5)  # when, CPU seconds by then

    def heard(self) -> None:
        self._last_heard = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since it was heard last."""
        return time.monotonic() - self._last_heard

    @property
    def idleness(self) -> float:
        """Seconds since it was last heard or seen to compute."""
        return time.monotonic() - max(self._last_heard, self._last_at_work)

    def look(self) -> bool:
        """Whether it neither speaks nor computes: stopped, swapped out or stuck. Call it about
        twice a second, and before `silence` and `idleness` are read: they leave out the time in
        which this process did not run itself (stopped, swapped out), and could hear nothing."""
        now = time.monotonic()
        missed = max(0.0, now - self._last_look - LONGEST_LOOK_SECONDS)
        self._last_heard = min(now, self._last_heard + missed)
        self._last_at_work = min(now, self._last_at_work + missed)
        self._last_look = now
        try:
            times = self._process.cpu_times()
        except psutil.NoSuchProcess:  # Ray will tell
            return False
        self._looks.append((now, times.user + times.system))
        (first, used_before), (last, used) = self._looks[0], self._looks[-1]
        enough = len(self._looks) == self._looks.maxlen
        computes = used - used_before >= LEAST_LOAD * (last - first)
        if computes and last > first:
            self._last_at_work = last
        return enough and not computes and self.silence > QUIET_SECONDS
