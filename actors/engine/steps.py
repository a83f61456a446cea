"""The steps of an engine: plan, forward, decide, commit, and what each does to its sequences.

Two ways to put steps one after the other stand side by side: `Steps.in_turn` and
`Steps.overlapped`. The driver (`Steps.step`, `actors.engine.loop`) says where the body
computes, and tells what happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.decision.own import OwnDecisions, OwnStep
from lexshard.actors.decision.plane import DecisionPlane, PendingStep
from lexshard.actors.decision.sampler import AllTokensExcludedError
from lexshard.actors.engine.constraints import BY_GRAMMAR, FORCED, Constraints, ForcedRun
from lexshard.actors.engine.scheduler import Chunk, Scheduler, StepPlan
from lexshard.actors.engine.scoring import score_prompt
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.speculation import Speculation
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_batch import build_batch
from lexshard.actors.engine.threads.choice import begin_step
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.head.build import BuiltHead
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.messages import (
    Certificate,
    FinishReason,
    RowDecision,
    SequenceEvent,
    SequenceTiming,
    TokenLogprobs,
    TokenOrigin,
)
from lexshard.actors.proposal import GuessTest
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates

# Starts a forward pass, or gets ready to; what it returns brings the hidden states.
StartForward = Callable[[StepPlan], Callable[[], torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class PendingRows:
    """Rows of a step whose decisions are on their way, with their certificates.

    They stand in the order of the plan's chunks, those of one chunk in order of position.
    """

    decisions: PendingStep | OwnStep  # [N]
    certificates: tuple[Certificate, ...]  # [N]


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """A step whose decisions have been asked for: `Steps.commit` ends it."""

    plan: StepPlan
    pending: PendingRows | None
    broken: dict[Sequence, Exception]
    late: set[Sequence]  # their masks were not there: what they draw comes in another step


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What has happened since the last one.

    While ``computing``, the body is at work: there is time to tell, but sequences must neither
    come nor go. ``idle`` says that there was nothing to compute and nothing to wait for.
    """

    events: Iterable[SequenceEvent] = ()
    computing: bool = False
    idle: bool = False


_COMPUTING, _BETWEEN, _IDLE = StepProgress(computing=True), StepProgress(), StepProgress(idle=True)


class Steps:
    """Moves the sequences of ``scheduler`` on, whose sampling state is in ``states``.

    Where decisions overlap (``overlaps``), those of a step are made beside the forward pass of the
    next one, which is of other sequences. ``speculation`` guesses tokens that are verified in the
    step that would have drawn them: a guess that is what its row draws saves a step, and none
    changes a token.
    """

    def __init__(
        self,
        model: LoadedModel,
        head: BuiltHead,
        plane: DecisionPlane | OwnDecisions,
        states: SequenceStates,
        scheduler: Scheduler,
        *,
        constraints: Constraints,
        overlaps: bool,
        speculation: Speculation | None = None,
    ) -> None:
        self.counters = Counters()
        self.overlaps = overlaps
        self._model = model
        self._head = head.head
        self._head_device = head.device
        self._plane = plane
        self._states = states
        self._scheduler = scheduler
        self._speculation = speculation
        self._constraints = constraints
        self._planned_at = 0.0
        self._in_flight: InFlightStep | None = None

    @property
    def launches(self) -> bool:
        """Whether `forward` only launches: a GPU computes, and the head waits for it."""
        return self._head_device.type != "cpu"

    # -- one step after the other -----------------------------------------------------------------

    def step(self) -> list[SequenceEvent]:
        """One step in this thread. Empty when there is nothing to tell.

        Where decisions overlap, those of the step before are committed: they were made beside this
        one's forward pass.
        """
        events: list[SequenceEvent] = []
        for progress in self.run(self._forward_here):
            events.extend(progress.events)
            if not progress.computing:
                break
        return events

    def run(self, start: StartForward) -> Iterator[StepProgress]:
        """Steps without end, their forward passes started by ``start``."""
        return self.overlapped(start) if self.overlaps else self.in_turn(start)

    def in_turn(self, start: StartForward) -> Iterator[StepProgress]:
        """The tokens of a step are decided before the next one is planned."""
        while True:
            plan = self.plan()
            if plan is None:
                yield _BETWEEN if self._constraints.wait() else _IDLE
                continue
            hidden = start(plan)
            yield _COMPUTING
            yield StepProgress(self.commit(self.decide(plan, hidden())))

    def overlapped(self, start: StartForward) -> Iterator[StepProgress]:
        """The tokens of a step are decided beside the forward pass of the next one."""
        while True:
            plan = self.plan()
            hidden = None if plan is None else start(plan)
            before, self._in_flight = self._in_flight, None
            events = [] if before is None else self.commit(before)
            if plan is None or hidden is None:
                late = before is None and self._constraints.wait()
                yield StepProgress(events, idle=before is None and not late)
                continue
            yield StepProgress(events, computing=True)
            self._in_flight = self.decide(plan, hidden())
            yield _BETWEEN

    def _forward_here(self, plan: StepPlan) -> Callable[[], torch.Tensor]:
        hidden = self.forward(plan)
        return lambda: hidden

    # -- the four parts of a step -----------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None when nothing can be computed now."""
        if self._scheduler.idle:
            return None
        drawing = self._scheduler.drawing()
        for sequence in drawing:
            sequence.take_guesses()
        if self._speculation is not None:
            self._speculation.draft(drawing, self.counters)
        self._constraints.prepare(drawing)
        self._planned_at = time.perf_counter()
        plan = self._scheduler.plan()
        self._constraints.start(plan)
        return plan if plan.chunks else None

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states ``[N, d]`` of the rows that score or draw (see ``build_batch``)."""
        started = time.perf_counter()
        begin_step(plan.tokens)
        hidden: torch.Tensor = self._model.body.forward(build_batch(plan)).to(self._head_device)
        seconds = time.perf_counter() - started
        self.counters.body_seconds += seconds
        self.counters.observe("body", seconds)
        return hidden

    def decide(self, plan: StepPlan, hidden: torch.Tensor) -> InFlightStep:
        """The head, and the decisions asked for: the plan's sequences that draw wait for them."""
        rows: list[int] = []
        chunks: list[Chunk] = []
        broken: dict[Sequence, Exception] = {}
        late = self._constraints.take(plan, broken)
        row = 0
        for chunk in plan.chunks:
            scored = len(chunk.scored)
            if scored:
                try:
                    score_prompt(self._head, chunk, hidden[row : row + scored])
                except NonFiniteHiddenError as error:
                    broken[chunk.sequence] = error
                row += scored
            if chunk.draws:
                if chunk.sequence not in broken and chunk.sequence not in late:
                    rows.extend(range(row, row + chunk.draws))
                    chunks.append(chunk)
                row += chunk.draws
        pending = None
        if chunks:
            if len(rows) < hidden.shape[0]:
                hidden = hidden[rows]
            pending = self._ask(hidden, chunks, broken)
        self.counters.steps += 1
        for chunk in plan.chunks:
            sequence = chunk.sequence
            stop = chunk.start + chunk.count
            self.counters.prompt_tokens += max(0, min(stop, sequence.prompt_length) - chunk.start)
            sequence.advance(chunk.count, self._scheduler.pool)
            # What ends or draws must be in no other plan before that is booked.
            sequence.awaiting = stop >= len(sequence.token_ids) or sequence in broken
        if self.overlaps:
            self._tell_cost(plan)
        return InFlightStep(plan, pending, broken, late)

    def commit(self, step: InFlightStep) -> list[SequenceEvent]:
        """Wait for a step's decisions and book them; what the clients are told."""
        started = time.perf_counter()
        decisions = [] if step.pending is None else step.pending.decisions.result()
        self.counters.decide_seconds += time.perf_counter() - started
        if step.pending is not None:
            self.counters.step_decided()
        events = []
        row = 0
        for chunk in step.plan.chunks:
            sequence = chunk.sequence
            first = row
            undecided = sequence in step.broken or sequence in step.late
            row += 0 if undecided else chunk.draws
            awaited, sequence.awaiting = sequence.awaiting, False
            if sequence.cancelled:
                if awaited:  # otherwise it was closed when it was cancelled
                    self._close(sequence)
                continue
            if sequence in step.late and sequence not in step.broken and chunk.draws:
                # Its last token is computed again, where the next one is drawn.
                kept = min(sequence.computed, len(sequence.token_ids) - 1)
                sequence.roll_back(kept, self._scheduler.pool)
                continue
            event = self._book(step, chunk, decisions, first)
            if event is not None:
                events.append(event)
        if not self.overlaps:
            self._tell_cost(step.plan)
        return events

    def _tell_cost(self, plan: StepPlan) -> None:
        """A step has ended, or is beside the next one from here on."""
        if self._speculation is not None:
            self._speculation.step_took(plan, time.perf_counter() - self._planned_at)

    # -- what they are made of --------------------------------------------------------------------

    def _ask(
        self, hidden: torch.Tensor, chunks: list[Chunk], broken: dict[Sequence, Exception]
    ) -> PendingRows | None:
        """Ask for a token for every row ``hidden [N, d]`` that ``chunks`` draw; rows that cannot
        have one end their sequence alone."""
        started = time.perf_counter()
        names: list[int] = []
        drafted: list[tuple[int, ...]] = []
        tests: dict[int, GuessTest] = {}  # by row
        masks: list[Mask | None] = []
        for chunk in chunks:
            own = chunk.sequence.masks
            if own or masks:
                masks = masks or [None] * len(names)
                masks.extend(own or [None] * chunk.draws)
            if chunk.drafted or drafted:
                drafted = drafted or [()] * len(names)
                drafted.extend(chunk.drafted[:place] for place in range(chunk.draws))
            tests.update(enumerate(chunk.tests(), len(names)))
            names.extend([chunk.sequence.arrival] * chunk.draws)
        exchanged = self._head.counters.exchange_seconds
        try:
            asked = RowNames(tuple(names), tuple(drafted), tests, tuple(masks))
            candidates = self._head.candidates(hidden, asked)
        except NonFiniteHiddenError as error:
            owners = [chunk.sequence for chunk in chunks for _ in range(chunk.draws)]
            broken.update((owners[row], error) for row in error.rows)
            rows = [row for row, sequence in enumerate(owners) if sequence not in broken]
            sound = [chunk for chunk in chunks if chunk.sequence not in broken]
            return self._ask(hidden[rows], sound, broken) if sound else None
        self.counters.count_certificates(candidates.certificates)
        decided = time.perf_counter()
        self._count_head(decided - started, self._head.counters.exchange_seconds - exchanged)
        if drafted:
            self.counters.verify_seconds += decided - started
        decisions = self._plane.submit(self.counters.steps, asked, candidates)
        self.counters.decide_seconds += time.perf_counter() - decided
        return PendingRows(decisions, candidates.certificates)

    def _count_head(self, seconds: float, exchange: float) -> None:
        """What the head took for a step, of which ``exchange`` went to other shards."""
        self.counters.head_seconds += seconds
        self.counters.observe("head", seconds)
        if self._head.counters.traffic:
            self.counters.observe("exchange", exchange)

    def _book(
        self,
        step: InFlightStep,
        chunk: Chunk,
        decisions: list[RowDecision | None],
        first: int,
    ) -> SequenceEvent | None:
        """Book what one chunk led to, whose rows begin with ``first``; what its client is told, if
        anything.

        A row's token is the sequence's own where all guesses before it were drawn, too.
        """
        sequence = chunk.sequence
        told = sequence.output_length
        broken = step.broken.get(sequence)
        if broken is None and chunk.draws and decisions[first] is None:
            broken = AllTokensExcludedError()
        if broken is not None:
            return self._event(sequence, told, (), reason="error", error=broken)
        if not chunk.draws:
            caught_up = chunk.start + chunk.count == len(sequence.token_ids)
            return self._event(sequence, told, (), reason="length") if caught_up else None
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        reason: FinishReason | None = None
        stop: int | None = None
        for place in range(chunk.draws):
            decision = decisions[first + place]
            if decision is None:  # the next step says so, when it is this token's turn
                break
            token_id = decision.token_id
            sequence.state.append(token_id)
            token_ids += (token_id,)
            if decision.logprobs is not None:
                logprobs += (decision.logprobs,)
            reason, stop = sequence.finish_reason(token_id, self._model.eos_token_ids)
            if reason is not None or chunk.drafted[place : place + 1] != (token_id,):
                break
        if chunk.drafted:
            stood = chunk.stood(token_ids)
            self.counters.count_guesses(len(chunk.drafted), stood)
            if self._speculation is not None and sequence.drafter == "engine":
                self._speculation.heard(chunk, len(token_ids), stood)
            kept = sequence.prompt_length + told + stood
            if reason is None:  # its last token is computed (again): the next one is drawn there
                kept = min(kept, len(sequence.token_ids) - 1)
            sequence.roll_back(kept, self._scheduler.pool)
        origins: tuple[TokenOrigin, ...] = ()
        if sequence.request.parameters.draft:
            origins = chunk.origins(token_ids, self._drafter_name(sequence))
        certificates: tuple[Certificate, ...] = ()
        if sequence.request.parameters.certificate and step.pending is not None:
            certificates = step.pending.certificates[first : first + len(token_ids)]
        forced = ForcedRun()
        if sequence.matcher is not None and reason is None and token_ids:
            try:
                forced = self._constraints.go_on(sequence, token_ids)
            except GrammarError as error:
                return self._event(sequence, told, (), reason="error", error=error)
            reason, stop = forced.reason, forced.stop
        self._note(sequence, token_ids + forced.token_ids)
        sequence.went_on(forced=len(forced.token_ids), ends=reason is not None)
        return self._event(
            sequence,
            told,
            token_ids,
            forced=forced.token_ids,
            logprobs=logprobs,
            certificates=certificates,
            origins=origins,
            reason=reason,
            stop=stop,
        )

    def begin(self, sequence: Sequence) -> SequenceEvent | None:
        """A sequence that the scheduler has been given; what its client is told where a grammar
        says all of its output."""
        if sequence.matcher is None or sequence.scores is not None:
            return None
        told = sequence.output_length
        try:
            forced = self._constraints.go_on(sequence, ())
        except GrammarError as error:
            return self._event(sequence, told, (), reason="error", error=error)
        self._note(sequence, forced.token_ids)
        if forced.reason is None:
            sequence.untold = forced.token_ids
            return None
        return self._event(
            sequence, told, (), forced=forced.token_ids, reason=forced.reason, stop=forced.stop
        )

    def _note(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """A sequence has been given tokens: all that follow it are told."""
        self._plane.append(sequence.arrival, *token_ids)
        self._head.append(sequence.arrival, *token_ids)
        self.counters.generated_tokens += len(token_ids)

    def _drafter_name(self, sequence: Sequence) -> str:
        if sequence.drafter == "client" or self._speculation is None:
            return sequence.drafter
        return self._speculation.drafter_name

    def _event(
        self,
        sequence: Sequence,
        told: int,
        token_ids: tuple[int, ...],
        *,
        forced: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        certificates: tuple[Certificate, ...] = (),
        origins: tuple[TokenOrigin, ...] = (),
        reason: FinishReason | None = None,
        stop: int | None = None,
        error: Exception | None = None,
    ) -> SequenceEvent:
        """What a client is told of ``token_ids``, and of those that a grammar has ``forced`` behind
        them, or before where they are untold. The sequence had ``told`` output tokens before; with
        a ``reason`` it ends."""
        request, parameters = sequence.request, sequence.request.parameters
        untold, sequence.untold = sequence.untold, ()
        first = told - len(untold) <= len(request.resumed_ids)
        self.counters.forced_tokens += len(untold) + len(forced)
        if untold or forced:
            before, behind = len(untold), len(forced)
            token_ids = (*untold, *token_ids, *forced)
            if parameters.certificate:
                certificates = (*[FORCED] * before, *certificates, *[FORCED] * behind)
            if parameters.draft:
                origins = (*[BY_GRAMMAR] * before, *origins, *[BY_GRAMMAR] * behind)
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
            refused=isinstance(error, AllTokensExcludedError | GrammarError),
            certificates=certificates,
            origins=origins,
            timing=self._timing(sequence) if first or reason is not None else None,
            answers=sequence.answers,
        )
        sequence.answers = None
        if reason is not None:
            self.counters.cached_prompt_tokens += sequence.cached_tokens
            self.counters.finished_prompt_tokens += sequence.prompt_length
            self.counters.finished += 1
            self._scheduler.remove(sequence)
            self._close(sequence)
        return event

    def _timing(self, sequence: Sequence) -> SequenceTiming:
        """Where the time of a sequence went until now, of which an event is about to tell."""
        spent = self.counters.verify_seconds, self._head.counters.exchange_seconds
        if sequence.first_token_at is None:
            sequence.first_token_at, sequence.spent_before = time.perf_counter(), spent
        verify, exchange = sequence.spent_before
        started = sequence.started_at or sequence.arrived_at
        return SequenceTiming(
            queued=started - sequence.arrived_at,
            prefill=sequence.first_token_at - started,
            verify=spent[0] - verify,
            exchange=spent[1] - exchange,
        )

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
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self._plane.close(sequence.arrival)
        self._head.close(sequence.arrival)
        self._states.close(sequence.arrival)


def _scores(sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    return None if sequence.scores is None else tuple(sequence.scores.entries)
