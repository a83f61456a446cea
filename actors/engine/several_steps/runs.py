"""Runs: steps in which the same sequences draw a token each, one behind the other.

What stands between two steps, a plan, the books, what clients are told, takes a small model as long
as half of what it computes. Where the next step is known before, because every sequence goes on and
nothing else is to be done, a few are taken before any of that; of a small fused body some of these
by one call (`kernels.steps`). Their tokens are those of so many steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch, Body
from lexshard.actors.body.fused import FusedBody
from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.engine.several_steps.answers import Answers
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_batch import block_tables, build_batch
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.head.plain_steps import SteadyRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import Certificate, RowDecision
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels import pool
from lexshard.kernels.ahead import SEVERAL_STEPS, is_postponed
from lexshard.kernels.certified import Certified
from lexshard.kernels.steps import Caller, Places

# What clients are told waits so long at most, or for one step: as long as a screen for its next
# picture. What they ask for waits for one step.
MOST_SECONDS = 0.016
# A call of several steps looks so often whether something is asked.
CALL_SECONDS = 0.0025


@dataclass(frozen=True, eq=False)
class RunSteps:
    """What the steps of a run came to, of N sequences. Its rows stand in the order of the
    sequences, those of one sequence in order of position. Sequences whose grammar has failed are
    ``broken``."""

    decisions: list[list[RowDecision]] = field(default_factory=list)  # by step [N]
    # By step what its tokens were drawn from, and the row of the first sequence in that.
    candidates: list[tuple[Candidates, int]] = field(default_factory=list)
    # By step the tokens that had to follow those of each sequence; empty where none had to.
    forced: list[list[tuple[int, ...]]] = field(default_factory=list)
    broken: dict[EngineSequence, Exception] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.decisions)

    def plan_of(self, plan: StepPlan) -> StepPlan:
        """What was computed, where ``plan`` was of the first step."""
        steps, chunks = self.steps, []
        for row, each in enumerate(plan.chunks):
            own = tuple(step[row] if step else () for step in self.forced)
            said, computed = steps + sum(map(len, own)), steps - 1 + sum(map(len, own[:-1]))
            chunk = Chunk(each.sequence, each.start, each.count + computed, steps, each.scored)
            chunks.append(replace(chunk, said=said, forced=own if said > steps else ()))
        return StepPlan(tuple(chunks), steps)

    def result(self) -> list[RowDecision | None]:
        """A decision per row."""
        return [each for own in zip(*self.decisions, strict=True) for each in own]

    @cached_property
    def certificates(self) -> tuple[Certificate, ...]:
        count = len(self.decisions[0])
        by_step = (each.certificates[row : row + count] for each, row in self.candidates)
        return tuple(each for own in zip(*by_step, strict=True) for each in own)

    @cached_property
    def _logits(self) -> list[float]:
        """Those of all tokens, one step's behind the other's; of one call they are all together."""
        found: list[float] = []
        pairs = zip(self.candidates, self.decisions, strict=True)
        for candidates, steps in groupby(pairs, key=lambda pair: pair[0][0]):
            found += candidates.logits_of(0, [each.token_id for _, own in steps for each in own])
        return found

    def logits_of(self, first: int, token_ids: Sequence[int]) -> list[float]:
        """See `Candidates.logits_of`; the rows are those of one sequence, from its ``first`` on."""
        return self._logits[first // self.steps :: len(self.decisions[0])][: len(token_ids)]


class Runs:
    """Takes runs of a ``body`` and a ``head`` in this process. Rows that the head does not decide
    at once ``plane`` does; ``constraints`` has the grammars of those that have one."""

    def __init__(
        self,
        body: Body,
        head: SequenceHead,
        plane: OwnDecisions,
        constraints: Constraints,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._body = body
        self._head = head
        self._plane = plane
        self._constraints = constraints
        self._eos_ids = eos_ids
        # Of the last run, and of how many rows; before the first, in a warm-up, as if it took none.
        self._step_seconds, self._rows = 1e-6, 1

    def take(
        self,
        plan: StepPlan,
        most: int,
        room: int,
        counters: Counters,
        asked: Callable[[], bool],
    ) -> RunSteps | None:
        """At most ``most`` steps of the sequences of ``plan``, which have blocks for ``room``
        tokens: until one of them ends, or has no more, or something is ``asked``. They are given
        their tokens, and those that grammars force. None where not even the first can be taken so,
        after which nothing is changed."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        draws = _Draws(self._head, self._plane, sequences)
        masked = [each for each in sequences if each.matcher is not None]
        began = time.perf_counter()
        size = self._head.vocabulary_size
        limits = [chunk.stop - 1 + room for chunk in plan.chunks]
        times = CALL_SECONDS, MOST_SECONDS
        fewest = self._head.fewest_screened if masked else 0
        answers = Answers(self._constraints, sequences, size, fewest, limits, asked, *times)
        run = _Run(plan, sequences, block_tables(plan), draws, masked, answers)
        expected = self._step_seconds * max(1.0, len(sequences) / self._rows)
        several = int(MOST_SECONDS / expected)
        goes_on, past = True, 0.0
        while goes_on:
            pool.begin_step(len(sequences))
            lengths = [len(each.token_ids) for each in sequences]
            left = min(limit - length for limit, length in zip(limits, lengths, strict=True)) + 1
            left = min(left, most - run.taken.steps)
            if left < 1:
                break
            goes_on = self._go_on(run, min(several, left))
            past = time.perf_counter() - began
            if past + past / max(run.taken.steps, 1) > MOST_SECONDS:
                break
            goes_on = goes_on and not (answers.ends or asked())
        answers.close()
        taken = run.taken
        if not taken.steps:
            return None
        self._step_seconds, self._rows = past / taken.steps, len(sequences)
        for place, sequence in enumerate(sequences if masked else ()):
            sequence.masks = [mask for each in run.masks if (mask := each[place]) is not None]
        counters.count_certificates(taken.certificates)
        counters.steps_took(taken.steps, run.body_seconds, past - run.body_seconds)
        return taken

    def _go_on(self, run: _Run, several: int) -> bool:
        """Takes ``several`` steps by one call, or one step; whether another one may follow."""
        at_once = self._several(run, several) if several > 1 else None
        found = run.answers.end()
        if at_once is None:
            return self._one(run, found=found)
        goes_on, count = True, len(run.sequences)
        heard = run.answers.forced
        for step, tokens in enumerate(at_once.tokens):
            decisions = list(map(RowDecision, tokens))
            forced = heard[step] if step < len(heard) else None
            goes_on = self._took(run, decisions, at_once.candidates, step * count, forced)
            if not goes_on:
                break
        goes_on &= run.answers.goes_on
        run.taken.broken.update(run.answers.broken)
        if not goes_on or at_once.hidden is None:
            return goes_on
        return self._one(run, at_once.hidden, at_once.left, found)

    def _several(self, run: _Run, steps: int) -> _AtOnce | None:
        """Up to so many steps by one call, if there is such a call."""
        if is_postponed(SEVERAL_STEPS) or not isinstance(self._body, FusedBody):
            return None
        asked = {each for own in run.sequences for each in own.request.parameters.stop_token_ids}
        stops = np.array([*self._eos_ids, *asked], np.int64)
        caller = run.answers.begin(run.pending())
        if caller is None:
            return None
        at_once = run.draws.several(self._body, run.places(steps), run.tokens(), stops, caller)
        if at_once is not None:
            run.body_seconds += at_once.body_seconds
        return at_once

    def _one(
        self,
        run: _Run,
        hidden: npt.NDArray[np.float32] | None = None,
        left: Certified | None = None,
        found: tuple[Mask | None, ...] | None = (),
    ) -> bool:
        """Takes one step, whose ``hidden`` states may be there already, what is left of its rows in
        them, and its masks, which were ``found``; whether another one may follow."""
        sequences, masked = run.sequences, run.masked
        if masked and not found:
            self._constraints.begin(masked, alone=len(sequences) == 1)
        if hidden is None:
            began = time.perf_counter()
            hidden = self._body.forward(run.batch()).numpy()
            run.body_seconds += time.perf_counter() - began
        if masked and not found:
            found = self._constraints.begun(sequences)
        decided = None if found is None else run.draws.draw(hidden, found, left)
        if decided is None:
            return False
        if found:
            run.masks.append(found)
        return self._took(run, *decided, 0)

    def _took(
        self,
        run: _Run,
        decisions: list[RowDecision],
        candidates: Candidates,
        first: int,
        forced: list[tuple[int, ...]] | None = None,
    ) -> bool:
        """One more step, whose rows are those of ``candidates`` from ``first`` on; whether another
        one may follow. Where tokens are given that are ``forced`` behind its own, so are these."""
        run.taken.decisions.append(decisions)
        run.taken.candidates.append((candidates, first))
        run.taken.forced.append(forced or [])
        if forced is not None:
            return True
        tokens = [each.token_id for each in decisions]
        return self._say(run.sequences, tokens, run.taken.broken)

    def _say(
        self,
        sequences: Sequence[EngineSequence],
        tokens: Sequence[int],
        broken: dict[EngineSequence, Exception],
    ) -> bool:
        """Gives each sequence its token; whether every one draws another behind it."""
        goes_on = True
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.state.append(token)
            parameters = sequence.request.parameters
            reason, _ = parameters.end_with(token, sequence.output_length, self._eos_ids)
            if reason is not None:
                goes_on = False
            elif sequence.matcher is not None:
                try:
                    goes_on &= self._constraints.draws_behind(sequence, token)
                except GrammarError as error:
                    broken[sequence] = error
                    goes_on = False
        return goes_on


Decided = tuple[list[RowDecision], Candidates]  # of one step, and what it was made from


@dataclass(slots=True, eq=False)
class _Run:
    """What has been taken of a run of N ``sequences``, which have the blocks of ``tables``. It
    began with ``plan``."""

    plan: StepPlan
    sequences: list[EngineSequence]
    tables: npt.NDArray[np.int32]  # [N, blocks]
    draws: _Draws
    masked: list[EngineSequence]  # which have a grammar
    answers: Answers  # to what calls ask between two steps
    taken: RunSteps = field(default_factory=RunSteps)
    masks: list[tuple[Mask | None, ...]] = field(default_factory=list)  # of steps that had some
    body_seconds: float = 0.0

    def pending(self) -> list[int]:
        """How many tokens that had to follow the next step computes behind the first of each
        sequence."""
        if self.taken.steps:
            return [0] * len(self.sequences)
        return [chunk.count - 1 for chunk in self.plan.chunks]

    def places(self, steps: int) -> Places:
        """Of so many steps from the next one on."""
        pairs = zip(self.sequences, self.pending(), strict=True)
        first = np.array([len(each.token_ids) - 1 - count for each, count in pairs], np.int64)
        return Places(steps, first, self.tables)

    def tokens(self) -> npt.NDArray[np.int64]:
        """With which the next step begins [N]."""
        pairs = zip(self.sequences, self.pending(), strict=True)
        return np.array([each.token_ids[-1 - count] for each, count in pairs], np.int64)

    def batch(self) -> Batch:
        """The next step."""
        if any(self.pending()):
            return build_batch(self.plan)
        places, rows = self.places(1).first, np.arange(len(self.sequences), dtype=np.int32)
        blocks = self.tables[rows, places // BLOCK_TOKENS].astype(np.int64)
        slots = blocks * BLOCK_TOKENS + places % BLOCK_TOKENS
        ids, positions = self.tokens().astype(np.int32), places.astype(np.int32)
        return Batch(ids, positions, slots, rows, self.tables, rows)


class _AtOnce(NamedTuple):
    """T steps of N rows that one call has taken; ``hidden`` states [N, d] of one more, which it
    did not decide, and what is ``left`` of the rows in that."""

    tokens: list[list[int]]  # [T, N]
    candidates: Candidates  # of T N rows, one step's behind the other's
    hidden: npt.NDArray[np.float32] | None
    left: Certified | None
    body_seconds: float


class _Draws:
    """The decisions of the steps of a run, of its ``sequences``."""

    def __init__(
        self, head: SequenceHead, plane: OwnDecisions, sequences: Sequence[EngineSequence]
    ) -> None:
        self._head = head
        self._plane = plane
        self._names = tuple(each.arrival for each in sequences)
        self._masks: tuple[Mask | None, ...] | None = None  # of the step before
        self._steady: SteadyRows | None = None

    def several(
        self,
        body: FusedBody,
        places: Places,
        tokens: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
        caller: Caller,
    ) -> _AtOnce | None:
        """Steps that one call takes (`kernels.steps.take_steps`), if it can: without masks, but for
        those that the ``caller`` has."""
        steady = self._steady_rows(())
        taken = None if steady is None else steady.take(body.stack, places, tokens, stops, caller)
        if steady is None or taken is None:
            return None
        candidates = steady.candidates(taken.found)
        return _AtOnce(taken.tokens, candidates, *taken[2:])

    def draw(
        self,
        hidden: npt.NDArray[np.float32],
        masks: tuple[Mask | None, ...],
        found: Certified | None = None,
    ) -> Decided | None:
        """The decisions for ``hidden`` [N, d], of which steady rows are perhaps ``found`` already;
        None where a row has none."""
        steady = self._steady_rows(masks)
        if steady is not None and found is None:
            found = steady.found(hidden)
        if steady is None or found is None:
            return self._step_by_step(hidden, masks)
        tokens = steady.drawn(found)
        if tokens is None:
            candidates = self._head.rescored(steady.decided(hidden, found))
            decided = self._decided(RowNames(self._names, masks=masks), candidates)
        else:
            decided = list(map(RowDecision, tokens)), steady.candidates(found)
        steady.advance()
        return decided

    def _steady_rows(self, masks: tuple[Mask | None, ...]) -> SteadyRows | None:
        if masks != self._masks:
            self._masks, self._steady = masks, self._head.steady(RowNames(self._names, masks=masks))
        return self._steady

    def _step_by_step(
        self, hidden: npt.NDArray[np.float32], masks: tuple[Mask | None, ...]
    ) -> Decided | None:
        if self._steady is not None:
            self._masks = None  # it is of another position then
        asked = RowNames(self._names, masks=masks)
        try:
            candidates = self._head.candidates(torch.from_numpy(hidden), asked)
        except NonFiniteHiddenError:
            return None
        return self._decided(asked, candidates)

    def _decided(self, asked: RowNames, candidates: Candidates) -> Decided | None:
        decided = self._plane.submit(0, asked, candidates).result()
        decisions = [each for each in decided if each is not None]
        return (decisions, candidates) if len(decisions) == len(decided) else None
