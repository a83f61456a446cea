"""The decision plane: which sampler decides which sequence, and what happens when one is lost.

Sequences stay with the sampler they were given to, so that only deltas travel. A decision depends
on a sequence's own history and on its logits, so the number of samplers changes no token, and the
work of a sampler that died is done again by another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Protocol

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import DecisionResult, DecisionWork
from lexshard.actors.decision.rows import is_dense, sequences_of, work_of
from lexshard.actors.messages import Request, RowDecision
from lexshard.actors.role import Place, RunningRole
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.row_table import RowNames

# Stands in for lost samplers until new ones are ready.
SUBSTITUTE = -1
# Seconds before a sampler that could not be started is tried again, doubling.
SHORTEST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0
COMING_SECONDS = 5.0  # that a plane which ends waits for samplers which have not begun yet

logger = logging.getLogger("lexshard.sampler")


class SamplerLostError(RuntimeError):
    """A sampler died; what it was asked must be asked elsewhere."""


class PendingDecision(Protocol):
    """Decisions on their way."""

    def result(self) -> DecisionResult:
        """Waits for them. Raises `SamplerLostError` where the sampler died."""


class SamplerHandle(Protocol):
    """A sampler, wherever it runs."""

    def submit(self, work: DecisionWork) -> PendingDecision:
        """Hands over ``work``, and waits only while the sampler has no room for it.

        Raises `SamplerLostError` where the sampler died.
        """

    def close(self) -> None:
        """Ends the sampler."""

    @property
    def place(self) -> Place:
        """Where it decides."""


@dataclass(slots=True)
class PlaneCounters:
    """Totals since the start; times in seconds.

    ``busy`` is the time all samplers computed, ``wait`` how long their decisions were waited for,
    and ``hidden`` how much of the busiest sampler's time of each step was not waited for.
    """

    busy: float = 0.0
    wait: float = 0.0
    hidden: float = 0.0
    lost: int = 0


class DecisionPlane:
    """``count`` samplers made by ``start``; ``substitute`` makes one in this process.

    The substitute decides while no other sampler is left. ``closing`` is set when the plane ends,
    so that ``start`` can give up. One thread uses a plane, but for `roles`. Raises what ``start``
    raises.
    """

    def __init__(
        self,
        start: Callable[[], SamplerHandle],
        count: int,
        substitute: Callable[[], SamplerHandle],
        vocabulary_size: int,
        *,
        closing: threading.Event | None = None,
    ) -> None:
        self.counters = PlaneCounters()
        self._start = start
        self._vocabulary_size = vocabulary_size
        self._starter = ThreadPoolExecutor(count, thread_name_prefix="start-sampler")
        self._closing = closing or threading.Event()
        self._backoff = SHORTEST_BACKOFF
        self._steps_in_flight = 0
        self._handles: dict[int, SamplerHandle] = {}
        self._coming: dict[int, Future[SamplerHandle]] = {}
        self._followers: dict[int, Follower] = {}  # by sampler
        self._sampler_of: dict[int, int] = {}  # by sequence
        # The first alone: what it compiles, the others find.
        self._add(0, start())
        self._coming = {index: self._starter.submit(start) for index in range(1, count)}
        try:
            while self._coming:
                index, coming = self._coming.popitem()
                self._add(index, coming.result())
            self._substitute = substitute()
        except BaseException:
            self.shut_down()
            raise

    # -- sequences --------------------------------------------------------------------------------

    def open(self, sequence: int, request: Request, history: list[int]) -> None:
        """A new sequence; ``history`` is prompt and output, which the caller keeps up to date."""
        self._give(sequence, FollowedSequence(request, history), self._least_loaded())

    def append(self, sequence: int, *token_ids: int) -> None:
        """Tokens have been added to a sequence's history."""
        self._followers[self._sampler_of[sequence]].append(sequence, token_ids)

    def close(self, sequence: int) -> None:
        """A sequence has ended."""
        self._followers[self._sampler_of.pop(sequence)].close(sequence)

    # -- decisions --------------------------------------------------------------------------------

    def submit(
        self,
        step: int,
        names: RowNames,
        candidates: Candidates,
    ) -> PendingStep:
        """Asks for a decision per row of ``candidates``, whose rows are those of ``names``. The
        arrays of ``candidates`` must stay as they are until the decisions are taken."""
        sequences = names.sequences
        self._take_in()
        dense = is_dense(candidates, self._vocabulary_size)
        groups: list[Sequence[int]] = [range(len(sequences))]
        if len(self._handles) > 1:
            rows_of: dict[int, list[int]] = {}
            for row, sequence in enumerate(sequences):
                rows_of.setdefault(self._sampler_of[sequence], []).append(row)
            groups = list(rows_of.values())
        parts = []
        for rows in groups:
            order, work = work_of(step, rows, names, candidates, dense)
            parts.append(_Part(order, work, *self.hand_over(work)))
        self._steps_in_flight += 1
        return PendingStep(self, parts, len(sequences))

    def shut_down(self) -> None:
        """Ends every sampler. One that is still to come, and may not, because there is no room for
        it, ends when it does."""
        self._closing.set()
        self._starter.shutdown(wait=False, cancel_futures=True)
        # `wait` takes a start that was withdrawn before it began for one that is still to end.
        begun = [coming for coming in self._coming.values() if not coming.cancelled()]
        wait(begun, COMING_SECONDS)
        for coming in self._coming.values():
            coming.add_done_callback(_end)
        for handle in self._handles.values():
            handle.close()

    def load(self) -> dict[int, int]:
        """How many sequences each sampler has."""
        return {index: len(self._followers[index].sequences) for index in self._handles}

    def roles(self) -> list[RunningRole]:
        """The samplers at work. May be asked in any thread, while samplers and sequences come and
        go in another: it looks at copies, which are made in one piece."""
        handles, followers = self._handles.copy(), self._followers.copy()
        load = {index: len(follower.sequences) for index, follower in followers.items()}
        return [
            RunningRole("sampler", index, handle.place, "cpu", f"{load.get(index, 0)} sequences")
            for index, handle in sorted(handles.items())
        ]

    def finish_step(self) -> None:
        """A step's decisions have been taken."""
        self._steps_in_flight -= 1

    def hand_over(self, work: DecisionWork) -> tuple[int, SamplerHandle, PendingDecision]:
        """Hands ``work`` to the sampler of its sequences, wherever they must move for that, with
        what that sampler has not been told."""
        while True:
            sampler = self._sampler_of[sequences_of(work)[0]]
            handle = self._handles[sampler]
            told = self._followers[sampler].take()
            try:
                return sampler, handle, handle.submit(replace(work, deltas=told))
            except SamplerLostError as error:
                self.lose(sampler, handle, error)

    # -- losing and replacing ---------------------------------------------------------------------

    def lose(self, sampler: int, handle: SamplerHandle, error: SamplerLostError) -> None:
        """A sampler died: its sequences move to one other, and a new sampler is started."""
        if self._handles.get(sampler) is not handle:
            return
        logger.warning("a sampler is lost and will be replaced: %s", error)
        self.counters.lost += 1
        del self._handles[sampler]
        lost = self._followers.pop(sampler)
        handle.close()
        self._coming[sampler] = self._starter.submit(self._start)
        if not self._handles:
            self._add(SUBSTITUTE, self._substitute)
        # All to one: a step that is asked again needs its sequences together.
        target = self._least_loaded()
        for sequence, followed in lost.sequences.items():
            self._give(sequence, followed, target)

    def _take_in(self) -> None:
        """Puts samplers that have become ready to work, and spreads the sequences over all."""
        if not self._coming or self._steps_in_flight:
            return
        ready = [index for index, coming in self._coming.items() if coming.done()]
        for index in ready:
            coming = self._coming.pop(index)
            error = coming.exception()
            if error is None:
                self._add(index, coming.result())
                self._backoff = SHORTEST_BACKOFF
            else:
                logger.warning("a sampler could not be started, trying again: %s", error)
                self._coming[index] = self._starter.submit(self._start_later, self._backoff)
                self._backoff = min(2.0 * self._backoff, LONGEST_BACKOFF)
        if any(index in self._handles for index in ready):
            self._spread()

    def _start_later(self, seconds: float) -> SamplerHandle:
        if self._closing.wait(seconds):
            raise SamplerLostError("the decision plane has been shut down")
        return self._start()

    def _spread(self) -> None:
        """Gives every sampler its share of the sequences, and the substitute none."""
        kept = [index for index in self._handles if index != SUBSTITUTE]
        most = -(-len(self._sampler_of) // len(kept))
        for index, follower in self._followers.items():
            too_many = list(follower.sequences)[most if index in kept else 0 :]
            for sequence in too_many:
                target = min(kept, key=lambda each: len(self._followers[each].sequences))
                self._give(sequence, follower.close(sequence), target)
        if self._handles.pop(SUBSTITUTE, None) is not None:
            # It has nothing to decide, but must forget.
            self._substitute.submit(DecisionWork(0, self._followers.pop(SUBSTITUTE).take()))

    def _give(self, sequence: int, followed: FollowedSequence, target: int) -> None:
        self._sampler_of[sequence] = target
        self._followers[target].open(sequence, followed)

    def _add(self, index: int, handle: SamplerHandle) -> None:
        self._followers[index] = Follower()
        self._handles[index] = handle

    def _least_loaded(self) -> int:
        if len(self._handles) == 1:
            return next(iter(self._handles))
        load = self.load()
        return min(load, key=lambda index: load[index])


@dataclass(slots=True)
class _Part:
    """One sampler's share of a step."""

    rows: list[int]  # in the order of the sampler's decisions
    work: DecisionWork
    sampler: int
    handle: SamplerHandle
    pending: PendingDecision


class PendingStep:
    """The decisions of one step."""

    def __init__(self, plane: DecisionPlane, parts: list[_Part], rows: int) -> None:
        self._plane = plane
        self._parts = parts
        self._rows = rows

    def result(self) -> list[RowDecision | None]:
        """Waits for a decision per row; None for a row that has no token left to draw. Once."""
        decisions: list[RowDecision | None] = [None] * self._rows
        counters = self._plane.counters
        longest = 0.0
        started = time.perf_counter()
        for part in self._parts:
            result = self._result(part)
            counters.busy += result.busy_seconds
            longest = max(longest, result.busy_seconds)
            for row, decision in zip(part.rows, result.decisions, strict=True):
                decisions[row] = decision
        wait = time.perf_counter() - started
        counters.wait += wait
        counters.hidden += max(0.0, longest - wait)
        self._plane.finish_step()
        return decisions

    def _result(self, part: _Part) -> DecisionResult:
        while True:
            try:
                return part.pending.result()
            except SamplerLostError as error:
                self._plane.lose(part.sampler, part.handle, error)
                part.sampler, part.handle, part.pending = self._plane.hand_over(part.work)


def _end(coming: Future[SamplerHandle]) -> None:
    if not coming.cancelled() and coming.exception() is None:
        coming.result().close()
