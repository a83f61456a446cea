"""The masks of a step, made while the body computes.

A grammar whose mask takes long keeps no other sequence waiting: its rows leave the step, and are
computed again when the mask is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lexshard.actors.grammar.matcher import GrammarError, Matcher
from lexshard.actors.messages import guesses_that_stand
from lexshard.actors.states.mask import Mask, Masks

THREADS = 2
# Masks that are not there when the hidden states are may take so long.
PATIENCE_SECONDS = 0.002


class PendingMasks:
    """The masks of one sequence's rows on their way: of the place after its own tokens, and after
    each more of its guesses."""

    def __init__(self, matcher: Matcher, guesses: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.guesses = guesses
        self._found: list[Mask] | GrammarError | None = None
        self._there: threading.Event | None = None  # where another thread makes them

    @property
    def done(self) -> bool:
        """Whether they are there, or will not come."""
        return self._found is not None

    @property
    def failed(self) -> bool:
        """Whether they cannot be made: `result` says why."""
        return isinstance(self._found, GrammarError)

    def serve(self, guesses: Sequence[int]) -> int:
        """How many of other ``guesses`` they are for, too."""
        return guesses_that_stand(self.guesses, guesses)

    def wait(self, seconds: float) -> bool:
        """Waits for them; whether they are there now."""
        return self.done or (self._there is not None and self._there.wait(seconds))

    def expect(self) -> None:
        """Another thread will make them."""
        self._there = threading.Event()

    def result(self) -> list[Mask]:
        """One more than guesses. Raises `GrammarError` where they cannot be made."""
        assert self._found is not None
        if isinstance(self._found, GrammarError):
            raise self._found
        return self._found

    def make(self, masks: Masks, lock: threading.Lock) -> None:
        """Makes them, here."""
        try:
            words = self.matcher.masks(self.guesses)
            with lock:
                self._found = [masks.of(each) for each in words]
        except BaseException as error:  # ends its own sequence; a panic is no Exception
            self._found = GrammarError(f"its mask cannot be made: {error}")
        if self._there is not None:
            self._there.set()


class StepMasks:
    """Makes masks in threads of its own, sequence by sequence."""

    def __init__(self, vocabulary_size: int) -> None:
        self._masks = Masks(vocabulary_size)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="masks")
        self._waiting: deque[PendingMasks] = deque()

    def start(self, wanted: Sequence[PendingMasks], *, alone: bool) -> None:
        """Begins with ``wanted``. Where no other sequence is in the step, which is ``alone``, they
        are made at once: most masks take 10 to 30 us, and another thread takes the interpreter away
        for 100."""
        if alone:
            for pending in wanted:
                pending.make(self._masks, self._lock)
            return
        for pending in wanted:
            pending.expect()
        self._waiting.extend(wanted)
        for _ in range(min(THREADS, len(wanted))):
            self._threads.submit(self._work)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while True:
            try:
                pending = self._waiting.popleft()
            except IndexError:
                return
            pending.make(self._masks, self._lock)


def wait_for(wanted: Sequence[PendingMasks]) -> None:
    """Waits for all of them, together no longer than they may take."""
    late = [pending for pending in wanted if not pending.done]
    deadline = time.monotonic() + PATIENCE_SECONDS if late else 0.0
    for pending in late:
        pending.wait(max(0.0, deadline - time.monotonic()))
