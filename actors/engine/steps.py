"""The steps of an engine: plan, forward, decide, commit.

Three ways to put steps one after the other stand side by side: `Steps.in_turn`, `Steps.overlapped`
and `Steps.ahead`. The driver (`Steps.step`, `actors.engine.loop`) says where the body
computes, and tells what happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.plane import DecisionPlane
from lexshard.actors.engine.booking import Booking, InFlightStep, PendingRows
from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.scoring import score_prompt
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.several_steps.ahead import (
    BegunStep,
    DeviceDraws,
    begins_alone,
    names_of,
)
from lexshard.actors.engine.several_steps.runs import Runs
from lexshard.actors.engine.speculation import Speculation
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_batch import build_batch
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.engine.threads.choice import begin_step
from lexshard.actors.head.build import BuiltHead
from lexshard.actors.head.gpu.device_rows import some_rows
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.messages import SequenceEvent
from lexshard.actors.proposal import GuessTest
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates

# Starts a forward pass, or gets ready to; what it returns brings the hidden states.
StartForward = Callable[[StepPlan], Callable[[], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What has happened since the last one.

    While ``computing``, the body is at work: there is time to tell, but sequences must neither
    come nor go. ``idle`` says that there was nothing to compute and nothing to wait for.
    """

    events: Iterable[SequenceEvent] = ()
    computing: bool = False
    idle: bool = False


logger = logging.getLogger("lexshard.engine")
_COMPUTING, _BETWEEN, _IDLE = StepProgress(computing=True), StepProgress(), StepProgress(idle=True)


class Steps:
    """Moves the sequences of ``scheduler`` on, whose sampling state is in ``states``.

    Where decisions overlap (``overlaps``), those of a step are made beside the forward pass of the
    next one, which is of other sequences. ``speculation`` guesses tokens that are verified in the
    step that would have drawn them: a guess that is what its row draws saves a step, and none
    changes a token. With ``draws_ahead`` a step begins from what the device has drawn, which must
    be the body's and the head's. Where a ``plane`` decides here, up to ``steps_at_once`` are a run
    (`actors.engine.several_steps.runs`).
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
        draws_ahead: bool = False,
        steps_at_once: int = 1,
        speculation: Speculation | None = None,
    ) -> None:
        self.overlaps = overlaps
        self.draws_ahead = draws_ahead
        self.booking = Booking(
            model.eos_token_ids, head.head, plane, states, scheduler, constraints, speculation
        )
        self._model = model
        self._head = head.head
        self._head_device = head.device
        self._plane = plane
        self._scheduler = scheduler
        self._states = states
        self._speculation = speculation
        self._constraints = constraints
        self.asked: Callable[[], bool] = lambda: False  # anything, for which no run is to go on
        self._runs: Runs | None = None
        self._most_at_once = 1
        if isinstance(plane, OwnDecisions) and not (overlaps or draws_ahead):
            self._most_at_once = steps_at_once
            self._runs = Runs(model.body, head.head, plane, constraints, model.eos_token_ids)
        self._planned_at, self._ended_at = 0.0, 0.0
        self._between = 0.0  # seconds since the step before, if nothing was waited for
        self._in_flight: InFlightStep | None = None
        self._begun: BegunStep | None = None
        self.device_draws = DeviceDraws()

    @property
    def counters(self) -> Counters:
        """What has been counted since the start, or since they were replaced."""
        return self.booking.counters

    @property
    def launches(self) -> bool:
        """Whether `forward` only launches: a GPU computes, and the head waits for it."""
        return self._head_device.type != "cpu"

    def check_rest(self) -> None:
        """Raise RuntimeError if an engine that has no sequences holds anything. Unlike
        `Scheduler.check` it looks at no block: the next request may be there already."""
        used, states = self._scheduler.pool.used, len(self._states)
        if self._scheduler.idle and (used or states):
            raise RuntimeError(f"{used} KV blocks and {states} sampling states leaked")

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
        if self.draws_ahead:
            return self.ahead()
        return self.overlapped(start) if self.overlaps else self.in_turn(start)

    def in_turn(self, start: StartForward) -> Iterator[StepProgress]:
        """The tokens of a step, or of a run of some, are decided before the next one is planned."""
        while True:
            plan = self.plan()
            if plan is None:
                yield _BETWEEN if self._constraints.wait() else _IDLE
                continue
            most = self._steps_of_run(plan)
            room = self._room_of_run(plan, most) if most > 1 else 1
            if room > 1:
                yield _COMPUTING
                run = self._take_run(plan, min(most, room), room)
                if run is not None:
                    yield StepProgress(self.commit(run))
                    continue
            self._constraints.start(plan)
            hidden = start(plan)
            yield _COMPUTING
            yield StepProgress(self.commit(self.decide(plan, hidden())))

    def _take_run(self, plan: StepPlan, most: int, room: int) -> InFlightStep | None:
        """Up to ``most`` steps like ``plan``, whose sequences have room for so many tokens each;
        None where none can be taken at once."""
        assert self._runs is not None
        begin_step(plan.tokens)
        taken = self._runs.take(plan, most, room, self.counters, self.asked)
        if taken is None:
            return None
        ran = taken.plan_of(plan)
        self._scheduler.charge_run(plan, ran)
        for chunk in ran.chunks:
            self._count_prompt(chunk)
            chunk.sequence.advance(chunk.count, self._scheduler.pool)
        return InFlightStep(ran, PendingRows(taken, taken), taken.broken, set())

    def _count_prompt(self, chunk: Chunk) -> None:
        stop = min(chunk.start + chunk.count, chunk.sequence.prompt_length)
        self.counters.prompt_tokens += max(0, stop - chunk.start)

    def _steps_of_run(self, plan: StepPlan) -> int:
        """How many steps in a row are like ``plan``, the sequences that will end aside."""
        most = self._most_at_once
        for chunk in plan.chunks:
            sequence = chunk.sequence
            alone = chunk.draws == 1 and chunk.count <= 1 + sequence.forced and not chunk.scored
            if not alone:
                return 1
            most = min(most, sequence.request.parameters.max_tokens - sequence.output_length)
            if sequence.drafter == "client":
                most = min(most, 1 + sequence.alone)
        if most > 1 and self._speculation is not None:
            free = self._speculation.steps_without([chunk.sequence for chunk in plan.chunks])
            most = most if free is None else min(most, free)
        return most

    def _room_of_run(self, plan: StepPlan, most: int) -> int:
        """For how many tokens of each sequence a run of ``most`` steps has room: those that
        grammars force take some, too."""
        if any(chunk.sequence.matcher is not None for chunk in plan.chunks):
            room = self._scheduler.room_for_run(plan, 2 * most)
            if room > 1:
                return room
        return self._scheduler.room_for_run(plan, most)

    def overlapped(self, start: StartForward) -> Iterator[StepProgress]:
        """The tokens of a step are decided beside the forward pass of the next one."""
        while True:
            plan, hidden = self.plan(), None
            if plan is not None:
                self._constraints.start(plan)
                hidden = start(plan)
            before, self._in_flight = self._in_flight, None
            events = [] if before is None else self.commit(before)
            if plan is None or hidden is None:
                late = before is None and self._constraints.wait()
                yield StepProgress(events, idle=before is None and not late)
                continue
            yield StepProgress(events, computing=True)
            self._in_flight = self.decide(plan, hidden())
            yield _BETWEEN

    def ahead(self) -> Iterator[StepProgress]:
        """The tokens of a step are decided while the next one computes, which began from those that
        the device had drawn."""
        while True:
            begun, self._begun = self._begun, None
            if begun is None:
                plan = self.plan()
                if plan is None:
                    yield _BETWEEN if self._constraints.wait() else _IDLE
                    continue
                self._constraints.start(plan)
                begun = self._begin(plan)
            following = self._follow(begun)
            yield _COMPUTING
            step = self.decide(begun.plan, begun.hidden, begun)
            events = self.commit(step)
            if following is not None:
                self._begun = self._kept(following, step)
            yield StepProgress(events)

    def _begin(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> BegunStep:
        """Launches a step: one of ``drawn`` tokens, or of those that its sequences have."""
        hidden = self.forward(plan, drawn)
        if not begins_alone(plan):
            return BegunStep(plan, hidden)
        names = names_of(plan, ahead=drawn is not None)
        thresholds = self._head.screened(hidden, names, drawn)
        return BegunStep(plan, hidden, thresholds, tuple(range(len(plan.chunks))))

    def _follow(self, begun: BegunStep) -> BegunStep | None:
        """Launches the step after one whose tokens are not decided, where that can be."""
        if begun.drawn is None or not self.device_draws.begins():
            return None
        plan = self._scheduler.follow(begun.plan)
        if plan is None:
            return None
        return self._begin(plan, begun.drawn_for(plan))

    def _kept(self, following: BegunStep, step: InFlightStep) -> BegunStep | None:
        """What can be used of a step that has begun, now that ``step`` is decided."""
        candidates = None if step.pending is None else step.pending.candidates
        found = candidates.drawn if isinstance(candidates, Candidates) else None
        if found is None or step.broken:
            return None
        drawn = dict(zip(step.plan.chunks, found.tolist(), strict=True))
        draws = self.device_draws
        draws.count(drawn)
        if draws.fails:
            logger.warning("%s: no step begins from the device's tokens any more", draws)
        kept = following.going_on_from({chunk.sequence: drawn[chunk] for chunk in drawn})
        if kept is not None:
            for chunk in kept.plan.chunks:
                chunk.sequence.awaiting = True  # it must not be forgotten when it is cancelled
        return kept

    def _forward_here(self, plan: StepPlan) -> Callable[[], torch.Tensor]:
        hidden = self.forward(plan)
        return lambda: hidden

    # -- the four parts of a step -----------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None when nothing can be computed now."""
        if self._scheduler.idle:
            self._ended_at = 0.0
            return None
        self._between = time.perf_counter() - self._ended_at if self._ended_at else 0.0
        drawing = self._scheduler.drawing()
        for sequence in drawing:
            sequence.take_guesses()
        drawing = [each for each in drawing if not each.held]
        if self._speculation is not None:
            self._speculation.draft(drawing, self.counters)
        self._constraints.prepare(drawing)
        self._planned_at = time.perf_counter()
        plan = self._scheduler.plan()
        return plan if plan.chunks else None

    def forward(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states ``[N, d]`` of the rows that score or draw (see ``build_batch``)."""
        started = time.perf_counter()
        begin_step(plan.tokens)
        hidden: torch.Tensor = self._model.body.forward(build_batch(plan, drawn)).to(
            self._head_device
        )
        seconds = time.perf_counter() - started
        self.counters.body_seconds += seconds
        self.counters.observe("body", seconds)
        return hidden

    def decide(
        self, plan: StepPlan, hidden: torch.Tensor, begun: BegunStep | None = None
    ) -> InFlightStep:
        """The head, and the decisions asked for: the plan's sequences that draw wait for them. A
        head that has ``begun`` ends."""
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
            if begun is not None and begun.thresholds is not None:
                pending = self._ask(hidden, chunks, broken, begun)
            else:
                pending = self._ask(some_rows(hidden, rows), chunks, broken)
        self.counters.steps += 1
        for chunk in plan.chunks:
            sequence = chunk.sequence
            stop = chunk.start + chunk.count
            self._count_prompt(chunk)
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
            self.counters.step_decided(step.plan.steps)
        events = []
        row = 0
        for chunk in step.plan.chunks:
            sequence = chunk.sequence
            first = row
            undecided = sequence in step.broken or sequence in step.late
            row += 0 if undecided and not chunk.said else chunk.draws
            awaited, sequence.awaiting = sequence.awaiting, False
            if sequence.cancelled:
                if awaited:  # otherwise it was closed when it was cancelled
                    self.booking.close(sequence)
                continue
            if sequence in step.late and sequence not in step.broken and chunk.draws:
                # Its last token is computed again, where the next one is drawn.
                kept = min(sequence.computed, len(sequence.token_ids) - 1)
                sequence.roll_back(kept, self._scheduler.pool)
                continue
            event = self.booking.book(step, chunk, decisions, first)
            if event is not None:
                events.append(event)
        if not self.overlaps:
            self._tell_cost(step.plan)
        return events

    def _tell_cost(self, plan: StepPlan) -> None:
        """A step has ended, or is beside the next one from here on. What clients are told, and what
        they ask for, comes after every step, and after a run of them once: guesses end runs."""
        if self._speculation is not None:
            self._ended_at = time.perf_counter()
            between = 0.0 if self.overlaps else self._between
            self._speculation.step_took(plan, self._ended_at - self._planned_at + between)

    # -- what they are made of --------------------------------------------------------------------

    def _ask(
        self,
        hidden: torch.Tensor,
        chunks: list[Chunk],
        broken: dict[Sequence, Exception],
        begun: BegunStep | None = None,
    ) -> PendingRows | None:
        """Ask for a token for every row ``hidden [N, d]`` that ``chunks`` draw; rows that cannot
        have one end their sequence alone. Of a step that has ``begun`` the rows are in it."""
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
            if begun is None:
                candidates = self._head.candidates(hidden, asked)
            else:
                candidates = begun.candidates(self._head)
        except NonFiniteHiddenError as error:
            if begun is not None:  # perhaps a row that was left out
                return self._ask(some_rows(hidden, begun.rows), chunks, broken)
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
        return PendingRows(decisions, candidates)

    def _count_head(self, seconds: float, exchange: float) -> None:
        """What the head took for a step, of which ``exchange`` went to other shards."""
        self.counters.head_seconds += seconds
        self.counters.observe("head", seconds)
        if self._head.counters.traffic:
            self.counters.observe("exchange", exchange)
