"""Runs: steps in which the same sequences draw a token each, one behind the other.

What stands between two steps, a plan, the books, what clients are told, takes a small model as long
as half of what it computes. Where the next step is known before, because every sequence goes on and
nothing else is to be done, a few are taken before any of that. Their tokens are those of so many
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch, Body
from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_batch import block_tables
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.head.plain_steps import SteadyRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import Certificate, RowDecision
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import RowNames

# What clients are told waits so long at most, or for one step: as long as a screen for its next
# picture. What they ask for waits for one step.
MOST_SECONDS = 0.016


@dataclass(frozen=True, slots=True, eq=False)
class RunSteps:
    """What the steps of a run came to, of N sequences. Its rows stand in the order of the
    sequences, those of one sequence in order of position. Sequences whose grammar has failed are
    ``broken``."""

    decisions: list[list[RowDecision]] = field(default_factory=list)  # by step [N]
    candidates: list[Candidates] = field(default_factory=list)  # by step, of N rows
    broken: dict[EngineSequence, Exception] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.decisions)

    def plan_of(self, plan: StepPlan) -> StepPlan:
        """What was computed, where ``plan`` was of the first step."""
        count = self.steps
        chunks = (
            Chunk(each.sequence, each.start, count, count, each.scored, said=count)
            for each in plan.chunks
        )
        return StepPlan(tuple(chunks), count)

    def result(self) -> list[RowDecision | None]:
        """A decision per row."""
        return [each for own in zip(*self.decisions, strict=True) for each in own]

    @property
    def certificates(self) -> tuple[Certificate, ...]:
        by_step = (each.certificates for each in self.candidates)
        return tuple(each for own in zip(*by_step, strict=True) for each in own)

    def logit_of(self, row: int, token_id: int) -> float:
        """See `Candidates.logit_of`."""
        sequence, step = divmod(row, self.steps)
        return self.candidates[step].logit_of(sequence, token_id)


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

    def take(
        self, plan: StepPlan, most: int, counters: Counters, asked: Callable[[], bool]
    ) -> RunSteps | None:
        """At most ``most`` steps of the sequences of ``plan``, for which they have blocks: until
        one of them ends or must go on with what its grammar says, or something is ``asked``. They
        are given their tokens. None where not even the first can be taken so, after which nothing
        is changed."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        places = _Places.of(plan, most)
        tokens = [each.token_ids[-1] for each in sequences]
        draws = _Draws(self._head, self._plane, sequences)
        masked = [each for each in sequences if each.matcher is not None]
        masks: list[tuple[Mask | None, ...]] = []  # of steps that had some
        taken = RunSteps()
        began = now = time.perf_counter()
        body = 0.0
        while taken.steps < most:
            step, started = taken.steps, now
            if masked:
                self._constraints.begin(masked, alone=len(sequences) == 1)
            hidden = self._body.forward(places.batch(step, tokens)).numpy()
            now = time.perf_counter()
            body += now - started
            found = self._constraints.begun(sequences) if masked else ()
            decided = None if found is None else draws.draw(hidden, found)
            if masked and not found and decided is not None:
                [drawn] = decided[0]
                if not self._constraints.allows(sequences[0], drawn.token_id):
                    self._constraints.begin(masked, alone=True)
                    found = self._constraints.begun(sequences)
                    decided = None if found is None else draws.draw(hidden, found)
            if decided is None:
                break
            if found:
                masks.append(found)
            taken.decisions.append(decided[0])
            taken.candidates.append(decided[1])
            tokens = [each.token_id for each in decided[0]]
            goes_on = self._say(sequences, tokens, taken.broken)
            now = time.perf_counter()
            past = now - began
            if not goes_on or past + past / taken.steps > MOST_SECONDS or asked():
                break
        if not taken.steps:
            return None
        for place, sequence in enumerate(sequences if masked else ()):
            sequence.masks = [mask for each in masks if (mask := each[place]) is not None]
        for each in taken.candidates:
            counters.count_certificates(each.certificates)
        counters.steps_took(taken.steps, body, now - began - body)
        return taken

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


class _Places(NamedTuple):
    """Where the tokens of N sequences go, step by step."""

    rows: npt.NDArray[np.int32]  # [N] each its own
    tables: npt.NDArray[np.int32]  # [N, blocks]
    positions: npt.NDArray[np.int32]  # [steps, N]
    slots: npt.NDArray[np.int64]  # [steps, N]

    @classmethod
    def of(cls, plan: StepPlan, steps: int) -> _Places:
        """Of ``steps`` that begin with ``plan``, in blocks that its sequences have."""
        rows = np.arange(len(plan.chunks), dtype=np.int32)
        tables = block_tables(plan)
        starts = np.array([chunk.start for chunk in plan.chunks], np.int32)
        positions = starts + np.arange(steps, dtype=np.int32)[:, None]
        blocks = tables[rows, positions // BLOCK_TOKENS].astype(np.int64)
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return cls(rows, tables, positions, slots)

    def batch(self, step: int, tokens: Sequence[int]) -> Batch:
        """One step, of the last ``tokens``."""
        ids, rows = np.array(tokens, np.int32), self.rows
        return Batch(ids, self.positions[step], self.slots[step], rows, self.tables, rows)


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

    def draw(
        self, hidden: npt.NDArray[np.float32], masks: tuple[Mask | None, ...]
    ) -> tuple[list[RowDecision], Candidates] | None:
        """The decisions for ``hidden`` [N, d], and what they were made from; None where a row has
        none."""
        if masks != self._masks:
            self._masks, self._steady = masks, self._head.steady(RowNames(self._names, masks=masks))
        steady = self._steady
        found = None if steady is None else steady.found(hidden)
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

    def _step_by_step(
        self, hidden: npt.NDArray[np.float32], masks: tuple[Mask | None, ...]
    ) -> tuple[list[RowDecision], Candidates] | None:
        if self._steady is not None:
            self._masks = None  # it is of another position then
        asked = RowNames(self._names, masks=masks)
        try:
            candidates = self._head.candidates(torch.from_numpy(hidden), asked)
        except NonFiniteHiddenError:
            return None
        return self._decided(asked, candidates)

    def _decided(
        self, asked: RowNames, candidates: Candidates
    ) -> tuple[list[RowDecision], Candidates] | None:
        decided = self._plane.submit(0, asked, candidates).result()
        decisions = [each for each in decided if each is not None]
        return (decisions, candidates) if len(decisions) == len(decided) else None
