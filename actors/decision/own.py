"""Decisions of an engine without samplers: in its own thread, from its own states."""

from __future__ import annotations

from dataclasses import dataclass

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import DecisionWork
from lexshard.actors.decision.plane import PlaneCounters
from lexshard.actors.decision.rows import is_dense, work_of
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.messages import Request, RowDecision
from lexshard.actors.role import RunningRole, here
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates


@dataclass(frozen=True, slots=True, eq=False)
class OwnStep:
    """The decisions of one step, made when they are asked for."""

    sampler: Sampler
    counters: PlaneCounters
    rows: list[int]  # in the order of the decisions
    work: DecisionWork

    def result(self) -> list[RowDecision | None]:
        """A decision per row; None for a row that has no token left to draw."""
        decided = self.sampler.decide(self.work)
        self.counters.busy += decided.busy_seconds
        self.counters.wait += decided.busy_seconds
        decisions = list(decided.decisions)
        if self.work.dense is not None:  # these come last
            for row, decision in zip(self.rows, decided.decisions, strict=True):
                decisions[row] = decision
        return decisions


class OwnDecisions:
    """``sampler`` reads ``states``, which the caller keeps: it is told nothing, and is never lost.

    What it is asked is what a `DecisionPlane` is.
    """

    def __init__(self, sampler: Sampler, states: SequenceStates) -> None:
        self.counters = PlaneCounters()
        self.sampler = sampler
        self._states = states

    def open(self, sequence: int, request: Request, history: list[int]) -> None:
        """Nothing to tell, as in the next two."""

    def append(self, sequence: int, *token_ids: int) -> None:
        pass

    def close(self, sequence: int) -> None:
        pass

    def submit(self, step: int, names: RowNames, candidates: Candidates) -> OwnStep:
        """A decision per row of ``candidates``, whose rows are those of ``names``. Its arrays must
        stay as they are until the decisions are taken."""
        dense = is_dense(candidates, self._states.vocabulary_size)
        rows, work = work_of(step, range(len(dense)), names, candidates, dense)
        return OwnStep(self.sampler, self.counters, rows, work)

    def roles(self) -> list[RunningRole]:
        """The one sampler there is."""
        return [RunningRole("sampler", 0, here(), "cpu", f"{len(self._states)} sequences")]

    def shut_down(self) -> None:
        """Nothing to end."""
