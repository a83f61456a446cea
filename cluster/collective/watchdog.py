"""Ends a process that waits for what will never come.

NCCL has no time-out: where a process has died, the others' kernels spin for good, and nothing that
waits for them can be called back. What helps is the end of the process, which the others' watchdogs
bring about as well; their owner forms the gang anew.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

EXIT_STATUS = 75  # EX_TEMPFAIL: the same again may work


class Expectation(NamedTuple):
    """``done`` is to be true before ``deadline`` (of the monotonic clock)."""

    what: str
    done: Callable[[], bool]
    deadline: float


def end_process(message: str) -> None:
    """Ends this process at once, whatever its threads are waiting for."""
    try:
        print(message, file=sys.stderr, flush=True)
    finally:  # also where what read it has gone
        os._exit(EXIT_STATUS)


class Watchdog:
    """Calls ``bite`` with what has not happened within ``seconds``; looks ten times in that time.

    Raises ValueError for ``seconds`` that are not positive.
    """

    def __init__(self, seconds: float, bite: Callable[[str], None] = end_process) -> None:
        if seconds <= 0:
            raise ValueError(f"a watchdog waits for a while, not for {seconds} s")
        self._seconds = seconds
        self._bite = bite
        self._expected: deque[Expectation] = deque()  # in order of deadline
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def expect(self, what: str, done: Callable[[], bool]) -> None:
        """``done`` is asked, in another thread, until it says so."""
        self._expected.append(Expectation(what, done, time.monotonic() + self._seconds))

    def close(self) -> None:
        """Nothing is expected any more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds / 10):
            while self._expected and self._expected[0].done():
                self._expected.popleft()
            if self._expected and time.monotonic() > self._expected[0].deadline:
                late = self._expected.popleft()
                self._bite(f"{late.what}: not done within {self._seconds:g} s, giving up")
