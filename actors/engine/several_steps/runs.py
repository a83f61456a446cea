"""Runs: steps in which the same sequences draw a token each, one behind the other.

What stands between two steps, a plan, the books, what clients are told, takes a small model as long
as half of what it computes. Where the next step is known before, because every sequence goes on and
nothing else is to be done, a few are taken before any of that. Their tokens are those of so many
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.batch import Batch, Body
from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_batch import block_tables
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.head.plain_steps import SteadyRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import Certificate, RowDecision
from lexshard.actors.states.row_table import RowNames

# What clients are told waits so long at most, or for one step: as long as a screen for its next
# picture. What they ask for waits for one step.
MOST_SECONDS = 0.016


@dataclass(frozen=True, slots=True, eq=False)
class RunSteps:
    """What the steps of a run came to, of N sequences. Its rows stand in the order of the
    sequences, those of one sequence in order of position."""

    tokens: list[list[int]]  # by step [N]
    candidates: list[Candidates]  # by step, of N rows

    @property
    def steps(self) -> int:
        return len(self.tokens)

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
        return [RowDecision(each) for own in zip(*self.tokens, strict=True) for each in own]

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
    at once ``plane`` does."""

    def __init__(
        self, body: Body, head: SequenceHead, plane: OwnDecisions, eos_ids: tuple[int, ...]
    ) -> None:
        self._body = body
        self._head = head
        self._plane = plane
        self._eos_ids = eos_ids

    def take(
        self, plan: StepPlan, most: int, counters: Counters, asked: Callable[[], bool]
    ) -> RunSteps | None:
        """At most ``most`` steps of the sequences of ``plan``, for which they have blocks: until
        one of them ends, or something is ``asked``. They are given their tokens. None where not
        even the first can be taken so, after which nothing is changed."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        names = tuple(each.arrival for each in sequences)
        steady = self._head.steady(RowNames(names))
        if steady is None:
            return None
        rows = np.arange(len(sequences), dtype=np.int32)
        tables = block_tables(plan)
        starts = np.array([chunk.start for chunk in plan.chunks], np.int32)
        positions = starts + np.arange(most, dtype=np.int32)[:, None]  # [steps, N]
        blocks = tables[rows, positions // BLOCK_TOKENS].astype(np.int64)
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        tokens = [each.token_ids[-1] for each in sequences]
        taken = RunSteps([], [])
        began = now = time.perf_counter()
        body = 0.0
        while taken.steps < most:
            step, started = taken.steps, now
            ids = np.array(tokens, np.int32)
            batch = Batch(ids, positions[step], slots[step], rows, tables, rows)
            hidden = self._body.forward(batch).numpy()
            now = time.perf_counter()
            body += now - started
            drawn = self._draw(steady, names, hidden)
            if drawn is None:
                break
            tokens, candidates = drawn
            steady.advance()
            taken.tokens.append(tokens)
            taken.candidates.append(candidates)
            ends = False
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.state.append(token)
                parameters = sequence.request.parameters
                reason, _ = parameters.end_with(token, sequence.output_length, self._eos_ids)
                ends = ends or reason is not None
            now = time.perf_counter()
            past = now - began
            if ends or past + past / taken.steps > MOST_SECONDS or asked():
                break
        if not taken.steps:
            return None
        for each in taken.candidates:
            counters.count_certificates(each.certificates)
        counters.steps_took(taken.steps, body, now - began - body)
        return taken

    def _draw(
        self, steady: SteadyRows, names: tuple[int, ...], hidden: npt.NDArray[np.float32]
    ) -> tuple[list[int], Candidates] | None:
        """The tokens of a step, and what they were drawn from."""
        found = steady.found(hidden)
        if found is None:
            return None
        tokens = steady.drawn(found)
        if tokens is not None:
            return tokens, steady.candidates(found)
        candidates = self._head.rescored(steady.decided(hidden, found))
        decided = self._plane.submit(0, RowNames(names), candidates).result()
        tokens = [each.token_id for each in decided if each is not None]
        return (tokens, candidates) if len(tokens) == len(decided) else None
