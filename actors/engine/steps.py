"""The steps of an engine: plan, forward, decide, commit, and what each does to its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from actors.body.loading import LoadedModel
from actors.decision.plane import DecisionPlane, PendingStep
from actors.decision.sampler import AllTokensExcludedError
from actors.engine.scheduler import Chunk, Scheduler, StepPlan
from actors.engine.scoring import score_prompt
from actors.engine.sequence import Sequence
from actors.engine.statistics import Counters
from actors.engine.step_batch import build_batch, scored_rows
from actors.head.build import BuiltHead
from actors.head.output_rows import NonFiniteHiddenError
from actors.messages import Certificate, FinishReason, RowDecision, SequenceEvent
from actors.states.sequence_state import SequenceStates


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Sequences of a step and their decisions on the way, with the certificates of their rows."""

    sequences: tuple[Sequence, ...]
    pending: PendingStep
    certificates: tuple[Certificate, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step whose decisions have been asked for: `Steps.commit` ends it."""

    plan: StepPlan
    asked: tuple[Asked, ...]
    broken: dict[Sequence, Exception]


class Steps:
    """Moves the sequences of ``scheduler`` on, whose sampling state is in ``states``.

    Where decisions overlap (``overlaps``), those of a step are made beside the forward pass of the
    next one, which is of other sequences.
    """

    def __init__(
        self,
        model: LoadedModel,
        head: BuiltHead,
        plane: DecisionPlane,
        states: SequenceStates,
        scheduler: Scheduler,
        *,
        overlaps: bool,
    ) -> None:
        self.counters = Counters()
        self.overlaps = overlaps
        self._model = model
        self._head = head.head
        self._head_device = head.device
        self._plane = plane
        self._states = states
        self._scheduler = scheduler
        self._flight: Flight | None = None

    def step(self) -> list[SequenceEvent]:
        """Plan, forward, decide, commit. Empty when there is nothing to tell.

        Where decisions overlap, those of the step before are committed: they were made beside this
        one's forward pass.
        """
        plan = self.plan()
        hidden = None if plan is None else self.forward(plan)
        events = [] if self._flight is None else self.commit(self._flight)
        self._flight = None
        if plan is not None and hidden is not None:
            self._flight = self.decide(plan, hidden)
            if not self.overlaps:
                events = self.commit(self._flight)
                self._flight = None
        return events

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None when nothing can be computed now."""
        if self._scheduler.idle:
            return None
        plan = self._scheduler.plan()
        return plan if plan.chunks else None

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states ``[N, d]`` of the rows that score or draw (see ``build_batch``)."""
        started = time.perf_counter()
        hidden: torch.Tensor = self._model.body.forward(build_batch(plan)).to(self._head_device)
        self.counters.body_seconds += time.perf_counter() - started
        return hidden

    def decide(self, plan: StepPlan, hidden: torch.Tensor) -> Flight:
        """The head, and the decisions asked for: the plan's sequences that draw wait for them."""
        rows: list[int] = []
        drawing: list[Sequence] = []
        broken: dict[Sequence, Exception] = {}
        row = 0
        for chunk in plan.chunks:
            scored = scored_rows(chunk)
            if scored:
                try:
                    score_prompt(self._head, chunk, hidden[row : row + scored])
                except NonFiniteHiddenError as error:
                    broken[chunk.sequence] = error
                row += scored
            if chunk.draws:
                if chunk.sequence not in broken:
                    rows.append(row)
                    drawing.append(chunk.sequence)
                row += 1
        asked: list[Asked] = []
        if drawing:
            if len(rows) < hidden.shape[0]:
                hidden = hidden[rows]
            self._ask(hidden, drawing, asked, broken)
        self.counters.steps += 1
        for chunk in plan.chunks:
            self.counters.prompt_tokens += max(
                0, min(chunk.start + chunk.count, chunk.sequence.prompt_length) - chunk.start
            )
            sequence = chunk.sequence
            sequence.advance(chunk.count, self._scheduler.pool)
            # What ends or draws must be in no other plan before that is booked.
            caught_up = chunk.start + chunk.count == len(sequence.token_ids)
            sequence.awaiting = caught_up or sequence in broken
        return Flight(plan, tuple(asked), broken)

    def _ask(
        self,
        hidden: torch.Tensor,
        sequences: list[Sequence],
        asked: list[Asked],
        broken: dict[Sequence, Exception],
    ) -> None:
        """Ask for a token for every row ``hidden [N, d]``; a row that cannot harms only itself."""
        started = time.perf_counter()
        try:
            needs = [sequence.state.need() for sequence in sequences]
            candidates = self._head.rescore(self._head.screen(hidden, needs))
        except NonFiniteHiddenError as error:
            for row in error.rows:
                broken[sequences[row]] = error
            sound = [row for row in range(len(sequences)) if row not in error.rows]
            if sound:
                self._ask(hidden[sound], [sequences[row] for row in sound], asked, broken)
            return
        self.counters.count_certificates(candidates.certificates)
        decided = time.perf_counter()
        self.counters.head_seconds += decided - started
        names = [sequence.arrival for sequence in sequences]
        pending = self._plane.submit(self.counters.steps, names, candidates)
        asked.append(Asked(tuple(sequences), pending, candidates.certificates))
        self.counters.decide_seconds += time.perf_counter() - decided

    def commit(self, flight: Flight) -> list[SequenceEvent]:
        """Wait for a step's decisions and book them; what the clients are told."""
        started = time.perf_counter()
        decisions: dict[Sequence, RowDecision] = {}
        certificates: dict[Sequence, Certificate] = {}
        for asked in flight.asked:
            drawn = asked.pending.result()
            for sequence, decision, certificate in zip(
                asked.sequences, drawn, asked.certificates, strict=True
            ):
                certificates[sequence] = certificate
                if decision is None:
                    flight.broken[sequence] = AllTokensExcludedError()
                else:
                    decisions[sequence] = decision
        self.counters.decide_seconds += time.perf_counter() - started
        events = []
        for chunk in flight.plan.chunks:
            sequence = chunk.sequence
            awaited, sequence.awaiting = sequence.awaiting, False
            if sequence.cancelled:
                if awaited:  # otherwise it was closed when it was cancelled
                    self._close(sequence)
                continue
            event = self._book(chunk, decisions, certificates, flight.broken)
            if event is not None:
                events.append(event)
        return events

    def _book(
        self,
        chunk: Chunk,
        decisions: dict[Sequence, RowDecision],
        certificates: dict[Sequence, Certificate],
        broken: dict[Sequence, Exception],
    ) -> SequenceEvent | None:
        """Book what one chunk led to; what its client is told, if anything."""
        sequence = chunk.sequence
        request = sequence.request
        if sequence in broken:
            return self._end(sequence, (), "error", None, error=broken[sequence])
        decision = decisions.get(sequence)
        if decision is None:
            caught_up = chunk.start + chunk.count == len(sequence.token_ids)
            return self._end(sequence, (), "length", None) if caught_up else None
        token_id = decision.token_id
        sequence.state.append(token_id)
        self._plane.append(sequence.arrival, token_id)
        self.counters.generated_tokens += 1
        logprobs = () if decision.logprobs is None else (decision.logprobs,)
        told = (certificates[sequence],) if request.parameters.certificate else ()
        reason, stop = self._finish_reason(sequence, token_id)
        if reason is not None:
            return self._end(
                sequence, (token_id,), reason, stop, logprobs=logprobs, certificates=told
            )
        first = sequence.output_length == len(request.resumed_ids) + 1
        return SequenceEvent(
            request.request_id,
            request.choice,
            (token_id,),
            logprobs,
            prompt_logprobs=_scores(sequence) if first else None,
            cached_tokens=sequence.cached_tokens,
            certificates=told,
        )

    def _finish_reason(
        self, sequence: Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        parameters = sequence.request.parameters
        if sequence.output_length >= parameters.min_tokens:
            if token_id in parameters.stop_token_ids:
                return "stop", token_id
            if not parameters.ignore_eos and token_id in self._model.eos_token_ids:
                return "stop", None
        if sequence.output_length >= parameters.max_tokens:
            return "length", None
        return None, None

    def _end(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        stop: int | None,
        *,
        logprobs: tuple = (),
        certificates: tuple[Certificate, ...] = (),
        error: Exception | None = None,
    ) -> SequenceEvent:
        request = sequence.request
        self.counters.cached_prompt_tokens += sequence.cached_tokens
        self.counters.finished += 1
        first = sequence.output_length <= len(request.resumed_ids) + 1
        event = SequenceEvent(
            request.request_id,
            request.choice,
            token_ids,
            logprobs,
            prompt_logprobs=_scores(sequence) if first else None,
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=sequence.cached_tokens,
            error=None if error is None else str(error),
            refused=isinstance(error, AllTokensExcludedError),
            certificates=certificates,
        )
        self._scheduler.remove(sequence)
        self._close(sequence)
        return event

    def cancel(self, request_id: str) -> None:
        """End every sequence of a request now; its blocks are free for the next step."""
        for sequence in self._scheduler.sequences_of(request_id):
            self._scheduler.remove(sequence)
            self.counters.cancelled += 1
            sequence.cancelled = True
            if not sequence.awaiting:
                self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Forget the sampling state of a sequence that has ended."""
        self._plane.close(sequence.arrival)
        self._states.close(sequence.arrival)


def _scores(sequence: Sequence) -> tuple | None:
    if sequence.request.parameters.prompt_logprobs is None or sequence.request.resumed_ids:
        return None
    return tuple(sequence.prompt_logprobs)
