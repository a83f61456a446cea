"""Steps that begin before the tokens they go on from are decided.

On a GPU the head's device draws for itself what the host will very likely decide. The next step
takes these tokens from the device's memory, and computes while the host decides. What the host
decides otherwise is computed again: no token depends on what the device has drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.head.gpu.device_rows import some_rows
from lexshard.actors.head.output_head import Thresholds
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.states.row_table import RowNames

UNKNOWN = 0  # stands for a token that only the device knows
FEWEST_TESTED = 64  # of the device's tokens, before any is called wrong too often
TOLERATED = 1 / 16  # of them, that the host decides otherwise
# Rows of some steps that the device may leave to the host, and for how many steps none is begun
# from its tokens after it left more: what follows such a step has few rows.
LEFT_OPEN, RESTED_STEPS = 1 / 4, 256


@dataclass(frozen=True, slots=True, eq=False)
class BegunStep:
    """A step that the device computes. With ``thresholds`` the head has begun, too: the plan's
    chunks draw a token each, in ``rows`` of it; without, it is still to be asked."""

    plan: StepPlan
    hidden: torch.Tensor  # [N, d]
    thresholds: Thresholds | None = None
    rows: tuple[int, ...] = ()

    @property
    def drawn(self) -> torch.Tensor | None:
        """The tokens [N] that the device draws, where it draws all of them."""
        return None if self.thresholds is None else self.thresholds.drawn

    def drawn_for(self, plan: StepPlan) -> torch.Tensor:
        """The tokens that the device draws for the sequences of ``plan``, which are among those of
        this step."""
        assert self.drawn is not None
        pairs = zip(self.plan.chunks, self.rows, strict=True)
        rows_of = {chunk.sequence: row for chunk, row in pairs}
        return some_rows(self.drawn, [rows_of[chunk.sequence] for chunk in plan.chunks])

    def candidates(self, head: SequenceHead) -> Candidates:
        """Those of the plan's chunks. Waits; raises as `SequenceHead.candidates`, also of rows that
        were left out."""
        assert self.thresholds is not None
        found = head.rescored(self.thresholds)
        if len(self.rows) == len(self.hidden):
            return found
        return found.some(self.rows, self.thresholds.rows.some(self.rows).flat)

    def going_on_from(self, drawn: Mapping[Sequence, int]) -> BegunStep | None:
        """What is left of it when the tokens of the step before are decided, for which the device
        had ``drawn`` these; None where nothing is."""
        kept = [
            place
            for place, chunk in enumerate(self.plan.chunks)
            if chunk.sequence.blocks
            and chunk.sequence.token_ids[chunk.start :] == [drawn.get(chunk.sequence, -1)]
        ]
        if not kept:
            return None
        chunks = tuple(self.plan.chunks[place] for place in kept)
        rows = tuple(self.rows[place] for place in kept)
        return BegunStep(StepPlan(chunks), self.hidden, self.thresholds, rows)


@dataclass(slots=True)
class DeviceDraws:
    """How often the host has decided what the device had drawn, where that had drawn a token."""

    decided: int = 0
    wrong: int = 0
    _rows: int = 0
    _left: int = 0
    _rests: int = 0

    def count(self, drawn: Mapping[Chunk, int]) -> None:
        """A step is decided whose chunks the device had ``drawn`` these tokens for, -1 for rows
        that it left to the host."""
        found = {chunk: token_id for chunk, token_id in drawn.items() if token_id >= 0}
        for chunk, token_id in found.items():
            for said in chunk.sequence.token_ids[chunk.start + 1 :][:1]:
                self.decided += 1
                self.wrong += said != token_id
        self._rows += len(drawn)
        self._left += len(drawn) - len(found)
        if self._rows >= FEWEST_TESTED:
            if self._left > LEFT_OPEN * self._rows:
                self._rests = RESTED_STEPS
            self._rows = self._left = 0

    def begins(self) -> bool:
        """Whether the next step may begin from its tokens; asked once a step."""
        self._rests = max(0, self._rests - 1)
        return not self._rests and not self.fails

    @property
    def fails(self) -> bool:
        """Whether it is wrong too often to begin a step with."""
        return self.decided >= FEWEST_TESTED and self.wrong > TOLERATED * self.decided


def begins_alone(plan: StepPlan) -> bool:
    """Whether every row of a step draws a token, and no ban comes or goes with the one before."""
    return all(map(_draws_alone, plan.chunks))


def names_of(plan: StepPlan, *, ahead: bool) -> RowNames:
    """The rows of a plan whose chunks draw a token each; ``ahead`` of the decision of one."""
    sequences = tuple(chunk.sequence.arrival for chunk in plan.chunks)
    return RowNames(sequences, unknown=int(ahead))


def _draws_alone(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return (
        chunk.count == chunk.draws == 1
        and not chunk.drafted
        and not chunk.scored
        and sequence.matcher is None
        and sequence.drafter != "client"
        and sequence.state.steady
    )
