"""What a draft model's KV cache holds of each sequence, and what is to be put in next.

After a step of the target a sequence's history holds the guesses that stood and one token more.
The keys and values of those guesses are in the cache already; what lies behind them is overwritten.
So it is with guesses that were given back in a history, to be guessed on from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.kv_cache import BLOCK_TOKENS, BlockPool
from lexshard.actors.messages import guesses_that_stand

MOST_PENDING = 512  # tokens put in by one call, over all sequences: a long prompt takes several


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A sequence's blocks: the keys and values of the first ``known`` tokens of its history and of
    the ``guessed`` ones after them. The last history was ``put`` in so far."""

    blocks: list[int] = field(default_factory=list)
    known: int = 0
    guessed: list[int] = field(default_factory=list)
    put: int = 0

    def agreed(self, history: list[int]) -> int:
        """How many tokens of ``history`` are in the cache."""
        return self.known + guesses_that_stand(self.guessed, history[self.known :])


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one call does for a task, which is the call's ``index``-th: put ``count`` tokens of its
    history in, from ``start`` on, and then guess ``most`` tokens (0: it has not caught up)."""

    index: int
    task: DraftTask
    cached: CachedSequence
    start: int
    count: int
    most: int

    @property
    def tokens(self) -> list[int]:
        return self.task.history[self.start : self.start + self.count]

    def finish(self, guesses: list[int]) -> None:
        """The tokens are in the cache, and all ``guesses`` but the last."""
        history, put = self.task.history, self.start + self.count
        known = min(put, len(history) - self.task.ahead)
        self.cached.known, self.cached.put = known, put
        self.cached.guessed = history[known:put] + guesses[:-1]


class DraftCache:
    """Blocks for the sequences drafted for, least recently drafted first out.

    ``least_pending`` tokens are put in at least where not all that was put in last is known to
    stand, and a history has so many. ``behind`` are the indices of the last call's tasks that have
    not caught up, but will. Raises ValueError if there is no block at all.
    """

    def __init__(self, blocks: int, max_positions: int, *, least_pending: int = 1) -> None:
        self._pool = BlockPool(blocks, prefix_cache=False)
        self._max_positions = max_positions
        self._least_pending = least_pending
        self._cached: dict[int, CachedSequence] = {}  # in the order of their last turns
        self.behind: set[int] = set()

    def turns(self, tasks: Sequence[DraftTask]) -> list[Turn]:
        """What to do for the tasks that want guesses, those with the fewest pending tokens first.

        A task has no turn where its history is longer than the model's positions, where there is
        no room for it beside the others of the call, or once ``MOST_PENDING`` tokens are taken.
        """
        wanted = {task.sequence for task in tasks if task.most > 0}
        pending = []
        for index, task in enumerate(tasks):
            length = len(task.history)
            if task.most == 0 or length == 0:
                continue
            if length > self._max_positions:
                self.forget(task.sequence)
                continue
            cached = self._cached.get(task.sequence)
            start = cached.agreed(task.history) if cached else 0
            if cached and (start >= length or start < cached.put):
                start = max(0, min(start, length - self._least_pending))
            pending.append((length - start, index))
        turns, left = [], MOST_PENDING
        self.behind = set()
        for wished, index in sorted(pending):
            task, count = tasks[index], min(wished, left)
            length = len(task.history)
            # The last guess is not put in.
            most = min(task.most, self._max_positions - length + 1)
            cached = self._room(task.sequence, length + most - 1, wanted) if count else None
            if count < wished and (cached or not count):
                self.behind.add(index)
            if cached is None:
                continue
            left -= count
            most = most if count == wished else 0
            turns.append(Turn(index, task, cached, length - wished, count, most))
        return turns

    def forget(self, sequence: int) -> None:
        """Let go of a sequence's blocks; unknown names are ignored."""
        cached = self._cached.pop(sequence, None)
        if cached is not None:
            self._pool.release(cached.blocks)

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self._pool.used

    def check(self) -> None:
        """Raise RuntimeError unless every block is free or some sequence's."""
        self._pool.check()
        held = sum(len(cached.blocks) for cached in self._cached.values())
        if held != self._pool.used:
            raise RuntimeError(f"{self._pool.used} draft KV blocks are used, {held} by sequences")

    def _room(self, sequence: int, tokens: int, wanted: Collection[int]) -> CachedSequence | None:
        """The sequence with blocks for ``tokens``, or None, and then without any: what it has is
        more use to another."""
        cached = self._cached.pop(sequence, None) or CachedSequence()
        self._cached[sequence] = cached
        missing = -(-tokens // BLOCK_TOKENS) - len(cached.blocks)
        others = [name for name in self._cached if name not in wanted]
        evictable = sum(len(self._cached[name].blocks) for name in others)
        if missing > self._pool.available + evictable:
            self.forget(sequence)
            return None
        while missing > self._pool.available:
            self.forget(others.pop(0))
        cached.blocks.extend(self._pool.allocate() for _ in range(missing))
        return cached


def block_tables(turns: Sequence[Turn]) -> npt.NDArray[np.int32]:
    """The blocks that the turns write and read, one row each."""
    widest = max(
        -(-(turn.start + turn.count + max(turn.most, 1) - 1) // BLOCK_TOKENS) for turn in turns
    )
    tables = np.zeros((len(turns), widest), np.int32)
    for row, turn in enumerate(turns):
        blocks = turn.cached.blocks[:widest]
        tables[row, : len(blocks)] = blocks
    return tables
