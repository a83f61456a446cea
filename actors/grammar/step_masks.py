"""The masks of a step, made while the body computes.

A grammar whose mask takes long keeps no other sequence waiting: its rows leave the step, and are
computed again when the mask is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

from lexshard.actors.grammar.matcher import GrammarError, Matcher
from lexshard.actors.messages import guesses_that_stand
from lexshard.actors.proposal import Proposal
from lexshard.actors.states.mask import Mask, Masks
from lexshard.kernels.masks import Words

THREADS = 2
# Masks that are not there when the hidden states are may take so long.
PATIENCE_SECONDS = 0.002


class MaskPlace(NamedTuple):
    """Where masks are written, one over the other: ``words`` [ceil(V / 64)], which begin at
    ``address``."""

    words: Words
    address: int
    vocabulary_size: int

    def mask(self) -> Mask:
        """The one that is there now."""
        return Mask(self.words.copy(), self.vocabulary_size)


class PendingMasks:
    """The masks of one sequence's rows on their way: of the place after its own tokens, and after
    each more of its guesses, drawn from ``proposals``. Where a ``place`` is given, the first,
    behind which the grammar forces nothing, is written there."""

    def __init__(
        self,
        matcher: Matcher,
        guesses: tuple[int, ...] = (),
        proposals: Sequence[Proposal] = (),
        place: MaskPlace | None = None,
    ) -> None:
        self.matcher = matcher
        self.guesses = guesses
        self.proposals = proposals
        self._place = place
        self._found: list[Mask] | GrammarError | None = None
        self._group: _Group | None = None  # where another thread makes them

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
        if not self.done and self._group is not None:
            self._group.all_made.wait(seconds)
        return self.done

    def expect(self, group: _Group) -> None:
        """Another thread will make them, those of one of a ``group``."""
        self._group = group

    def result(self) -> list[Mask]:
        """One more than guesses. Raises `GrammarError` where they cannot be made."""
        assert self._found is not None
        if isinstance(self._found, GrammarError):
            raise self._found
        return self._found if self._place is None else [self._place.mask()]

    def make(self, masks: Masks, lock: threading.Lock) -> None:
        """Makes them, here."""
        try:
            if self._place is not None:
                self.matcher.write_mask(self._place.address)
                self._found = []
            else:
                words = self.matcher.masks(self.guesses)
                with lock:
                    self._found = [masks.of(each) for each in words]
        except BaseException as error:  # ends its own sequence; a panic is no Exception
            self._found = GrammarError(f"its mask cannot be made: {error}")
        if self._group is not None:
            self._group.made()


class _Group:
    """Sequences whose masks were asked for together, ``count`` of them."""

    def __init__(self, count: int) -> None:
        self.all_made = threading.Event()
        self._left = count
        self._lock = threading.Lock()

    def made(self) -> None:
        """Those of one more are there."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self.all_made.set()


class StepMasks:
    """Makes masks in threads of its own, sequence by sequence."""

    def __init__(self, vocabulary_size: int) -> None:
        self._masks = Masks(vocabulary_size)
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[PendingMasks | None] = SimpleQueue()
        for number in range(THREADS):
            threading.Thread(target=self._work, name=f"masks_{number}", daemon=True).start()

    def start(self, wanted: Sequence[PendingMasks], *, alone: bool) -> None:
        """Begins with ``wanted``. Where no other sequence is in the step, which is ``alone``, they
        are made at once: most masks take 10 to 30 us, and another thread takes the interpreter away
        for 100."""
        if alone:
            for pending in wanted:
                pending.make(self._masks, self._lock)
            return
        group = _Group(len(wanted))
        for pending in wanted:
            pending.expect(group)
            self._wanted.put(pending)

    def close(self) -> None:
        """Ends the threads."""
        for _ in range(THREADS):
            self._wanted.put(None)

    def _work(self) -> None:
        while (pending := self._wanted.get()) is not None:
            pending.make(self._masks, self._lock)


def wait_for(wanted: Sequence[PendingMasks]) -> bool:
    """Waits for all of them, together no longer than they may take; whether they are there."""
    late = [pending for pending in wanted if not pending.done]
    deadline = time.monotonic() + PATIENCE_SECONDS if late else 0.0
    there = [pending.wait(max(0.0, deadline - time.monotonic())) for pending in late]
    return all(there)
