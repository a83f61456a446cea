"""The decision plane: which sampler decides which sequence, and what happens when one is lost.

Sequences stay with the sampler they were given to, so that only deltas travel. A decision depends
on a sequence's own history and on its logits, so the number of samplers changes no token, and the
work of a sampler that died is done again by another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from actors.decision_messages import (
    CandidateRows,
    DecisionResult,
    DecisionWork,
    Deltas,
    DenseRows,
    OpenSequence,
)
from actors.messages import Candidates, Request, RowDecision

# Stands in for lost samplers until new ones are ready.
SUBSTITUTE = -1


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


@dataclass(slots=True)
class PlaneCounters:
    """Totals since the start; times in seconds.

    ``busy`` is the time all samplers computed, ``wait`` how long their decisions were waited for,
    and ``hidden`` how much of the busiest sampler's time of each step nobody waited for.
    """

    busy: float = 0.0
    wait: float = 0.0
    hidden: float = 0.0
    lost: int = 0


@dataclass(slots=True)
class _Member:
    """A sequence: its request, its tokens (the engine's own list) and the sampler it is with."""

    request: Request
    history: list[int]
    sampler: int


@dataclass(slots=True)
class _Outbox:
    """Deltas a sampler has not been told."""

    closed: list[int] = field(default_factory=list)
    opened: dict[int, OpenSequence] = field(default_factory=dict)
    appended: list[tuple[int, int]] = field(default_factory=list)

    def take(self) -> Deltas:
        deltas = Deltas(tuple(self.closed), tuple(self.opened.values()), tuple(self.appended))
        self.closed, self.opened, self.appended = [], {}, []
        return deltas

    def close(self, sequence: int) -> None:
        if self.opened.pop(sequence, None) is None:
            self.closed.append(sequence)
        self.appended = [each for each in self.appended if each[0] != sequence]


class DecisionPlane:
    """``count`` samplers made by ``start``; ``substitute`` makes one in this process.

    Samplers that are ``informed`` share the caller's states and are told nothing. One thread uses
    a plane. Raises what ``start`` raises.
    """

    def __init__(
        self,
        start: Callable[[], SamplerHandle],
        count: int,
        substitute: Callable[[], SamplerHandle],
        vocabulary_size: int,
        *,
        informed: bool = False,
    ) -> None:
        self.counters = PlaneCounters()
        self._informed = informed
        self._start = start
        self._make_substitute = substitute
        self._vocabulary_size = vocabulary_size
        self._starter = ThreadPoolExecutor(count, thread_name_prefix="start-sampler")
        self._handles: dict[int, SamplerHandle] = {}
        self._coming: dict[int, Future[SamplerHandle]] = {}
        self._members: dict[int, _Member] = {}
        self._outboxes: dict[int, _Outbox] = {}
        # The first alone: what it compiles, the others find.
        self._add(0, start())
        starting = [self._starter.submit(start) for _ in range(1, count)]
        for index, each in enumerate(starting, 1):
            self._add(index, each.result())

    # -- sequences --------------------------------------------------------------------------------

    def open(self, sequence: int, request: Request, history: list[int]) -> None:
        """A new sequence; ``history`` is prompt and output, which the caller keeps up to date."""
        self._members[sequence] = member = _Member(request, history, self._least_loaded())
        if self._informed:
            return
        self._outboxes[member.sampler].opened[sequence] = _opening(sequence, member)

    def append(self, sequence: int, token_id: int) -> None:
        """A token has been added to a sequence's history."""
        if self._informed:
            return
        outbox = self._outboxes[self._members[sequence].sampler]
        if sequence in outbox.opened:
            outbox.opened[sequence] = _opening(sequence, self._members[sequence])
        else:
            outbox.appended.append((sequence, token_id))

    def close(self, sequence: int) -> None:
        """A sequence has ended."""
        member = self._members.pop(sequence)
        if not self._informed:
            self._outboxes[member.sampler].close(sequence)

    # -- decisions --------------------------------------------------------------------------------

    def submit(self, step: int, sequences: Sequence[int], candidates: Candidates) -> PendingStep:
        """Asks for a decision per row of ``candidates``, which belongs to ``sequences[row]``.

        The arrays of ``candidates`` must stay as they are until the decisions are taken.
        """
        self._take_in()
        rows_of: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows_of.setdefault(self._members[sequence].sampler, []).append(row)
        parts = []
        for rows in rows_of.values():
            order, asked = self._work(step, rows, sequences, candidates)
            parts.append(_Part(order, asked, *self._hand_over(asked)))
        return PendingStep(self, parts, len(sequences))

    def shut_down(self) -> None:
        """Ends every sampler."""
        self._starter.shutdown(wait=True)
        for coming in self._coming.values():
            if coming.exception() is None:
                coming.result().close()
        for handle in self._handles.values():
            handle.close()

    @property
    def samplers(self) -> int:
        """How many samplers are at work."""
        return len(self._handles)

    def _work(
        self, step: int, rows: Sequence[int], sequences: Sequence[int], candidates: Candidates
    ) -> tuple[list[int], DecisionWork]:
        """``rows`` in the order of their decisions, and the work without deltas."""
        counts = np.diff(candidates.offsets).tolist()
        whole = [
            count == self._vocabulary_size and not certificate.truncated
            for count, certificate in zip(counts, candidates.certificates, strict=True)
        ]
        dense = [row for row in rows if whole[row]]
        chosen = [row for row in rows if not whole[row]]
        work = DecisionWork(
            step,
            Deltas(),
            _candidate_rows(chosen, sequences, candidates) if chosen else None,
            _dense_rows(dense, sequences, candidates) if dense else None,
        )
        return [*chosen, *dense], work

    def _hand_over(self, asked: DecisionWork) -> tuple[int, PendingDecision]:
        """Hands ``asked`` to the sampler of its sequences, wherever they must move for that."""
        while True:
            sampler = self._members[_sequences(asked)[0]].sampler
            deltas = self._outboxes[sampler].take()
            work = DecisionWork(asked.step, deltas, asked.candidates, asked.dense)
            try:
                return sampler, self._handles[sampler].submit(work)
            except SamplerLostError:
                self.lose(sampler)

    # -- losing and replacing ---------------------------------------------------------------------

    def lose(self, sampler: int) -> None:
        """A sampler died: its sequences move to one other, and a new sampler is started."""
        if sampler not in self._handles:
            return
        self.counters.lost += 1
        self._handles.pop(sampler).close()
        del self._outboxes[sampler]
        self._coming[sampler] = self._starter.submit(self._start)
        if not self._handles:
            self._add(SUBSTITUTE, self._make_substitute())
        self._move(sampler, self._least_loaded())

    def _take_in(self) -> None:
        """Puts samplers that have become ready to work, in place of the substitute."""
        ready = [index for index, coming in self._coming.items() if coming.done()]
        for index in ready:
            self._add(index, self._coming.pop(index).result())
        if ready and SUBSTITUTE in self._handles:
            self._move(SUBSTITUTE, ready[0])
            self._handles.pop(SUBSTITUTE).close()
            del self._outboxes[SUBSTITUTE]

    def _add(self, index: int, handle: SamplerHandle) -> None:
        self._handles[index] = handle
        self._outboxes[index] = _Outbox()

    def _move(self, source: int, target: int) -> None:
        for sequence, member in self._members.items():
            if member.sampler == source:
                member.sampler = target
                self._outboxes[target].opened[sequence] = _opening(sequence, member)

    def _least_loaded(self) -> int:
        load = dict.fromkeys(self._handles, 0)
        for member in self._members.values():
            if member.sampler in load:
                load[member.sampler] += 1
        return min(load, key=lambda index: load[index])


@dataclass(slots=True)
class _Part:
    """One sampler's share of a step."""

    rows: list[int]  # in the order of the sampler's decisions
    asked: DecisionWork
    sampler: int
    pending: PendingDecision


class PendingStep:
    """The decisions of one step."""

    def __init__(self, plane: DecisionPlane, parts: list[_Part], rows: int) -> None:
        self._plane = plane
        self._parts = parts
        self._rows = rows

    def result(self) -> list[RowDecision | None]:
        """Waits for a decision per row; None for a row that has no token left to draw."""
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
        return decisions

    def _result(self, part: _Part) -> DecisionResult:
        while True:
            try:
                return part.pending.result()
            except SamplerLostError:
                self._plane.lose(part.sampler)
                part.sampler, part.pending = self._plane._hand_over(part.asked)


def _opening(sequence: int, member: _Member) -> OpenSequence:
    output = tuple(member.history[len(member.request.prompt_ids) :])
    return OpenSequence(sequence, member.request, output)


def _sequences(work: DecisionWork) -> tuple[int, ...]:
    first = () if work.candidates is None else work.candidates.sequences
    return first if work.dense is None else (*first, *work.dense.sequences)


def _candidate_rows(
    rows: Sequence[int], sequences: Sequence[int], candidates: Candidates
) -> CandidateRows:
    truncated = np.array([candidates.certificates[row].truncated for row in rows], np.bool_)
    ids, raw, offsets = candidates.ids, candidates.raw, candidates.offsets
    if len(rows) < len(sequences):
        own = [slice(offsets[row], offsets[row + 1]) for row in rows]
        ids = np.concatenate([ids[each] for each in own])
        raw = np.concatenate([raw[each] for each in own])
        offsets = np.cumsum([0, *np.diff(offsets)[list(rows)]], dtype=np.int64)
    return CandidateRows(tuple(sequences[row] for row in rows), ids, raw, offsets, truncated)


def _dense_rows(rows: Sequence[int], sequences: Sequence[int], candidates: Candidates) -> DenseRows:
    size = int(candidates.offsets[rows[0] + 1] - candidates.offsets[rows[0]])
    first, last = candidates.offsets[rows[0]], candidates.offsets[rows[-1] + 1]
    if last - first == size * len(rows):  # side by side
        logits = candidates.raw[first:last].reshape(len(rows), size)
    else:
        logits = np.stack([candidates.raw[candidates.offsets[row] :][:size] for row in rows])
    return DenseRows(tuple(sequences[row] for row in rows), logits.T)
