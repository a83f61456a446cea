"""A head that knows its sequences: from hidden states and names of rows to candidates.

What a row needs (guarantee, noise, processors) follows from its sequence's sampling state, which a
head in the engine's process shares with the engine. Shards elsewhere keep their own, from the same
deltas that samplers get, so that names of rows are all that travels with hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import Operation, Traffic
from lexshard.actors.head.output_head import HeadThatDraws, OutputHead, Thresholds
from lexshard.actors.head.plain_steps import SteadyRows, fewest_screened
from lexshard.actors.head.shard import Shard
from lexshard.actors.head.softmax.guess_tests import decide_by_candidates
from lexshard.actors.messages import Request
from lexshard.actors.role import RunningRole, here
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates


@dataclass(slots=True)
class ShardCounters:
    """Totals since the start: groups of shards formed after the first, the seconds that steps
    waited for them, and what this process exchanged with the others; nothing where there are
    none."""

    regroupings: int = 0
    seconds: float = 0.0
    traffic: Mapping[Operation, Traffic] = field(default_factory=dict)

    @property
    def exchange_seconds(self) -> float:
        """Spent on exchanges of every kind."""
        if not self.traffic:  # nearly always, and asked twice a step
            return 0.0
        return 1e-6 * sum(each.microseconds for each in self.traffic.values())


class SequenceHead:
    """``head`` with the ``states`` of the sequences whose rows it is asked about."""

    def __init__(self, head: OutputHead, states: SequenceStates) -> None:
        self.head = head
        self.vocabulary_size = head.vocabulary_size
        self.counters = ShardCounters()
        self._states = states

    def candidates(
        self,
        hidden: torch.Tensor,
        names: RowNames,
    ) -> Candidates:
        """The candidates of rows ``hidden`` [N, d], which are those of ``names``.

        Of rows that test a guess by distributions every token is a candidate, or that alone which
        the row emits. Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        rows = self._states.table(names)
        found = self._decide(hidden, rows, names)
        if not names.tests:
            return found
        return decide_by_candidates(found, rows, names.tests, self.vocabulary_size)

    def screened(
        self, hidden: torch.Tensor, names: RowNames, before: torch.Tensor | None = None
    ) -> Thresholds:
        """Begins what `candidates` gives of rows that test no guess; on a GPU nothing waits.
        ``before`` [N] int32 is the token there that each row follows, if no one else knows it."""
        rows = self._states.table(names)
        if before is None:
            return self.head.screen(hidden, rows)
        return cast(HeadThatDraws, self.head).screen(hidden, rows, before)

    def rescored(self, thresholds: Thresholds) -> Candidates:
        """The candidates of `screened` rows. Raises as `candidates`."""
        return self.head.rescore(thresholds)

    def steady(self, names: RowNames) -> SteadyRows | None:
        """Steps of sequences that draw a token each, one after the other; None where a step is not
        like the one before, or several calls decide it."""
        if not isinstance(self.head, Shard):
            return None
        # Candidates are what masks hold: the draw needs none.
        drawing = self._states.steady_table(names._replace(masks=()))
        rows = self._states.steady_table(names) if names.masks else drawing
        if rows is None or drawing is None or drawing.packed is None:
            return None
        return self.head.steady(rows, drawing.packed)

    @property
    def fewest_screened(self) -> int:
        """In steps of which a call takes several, masks of so many tokens or fewer are left to
        others, which compute these tokens alone."""
        if not isinstance(self.head, Shard):
            return 0
        return fewest_screened(self.vocabulary_size, self.head.weight.shape[1])

    def whole_rows(self, hidden: torch.Tensor) -> Candidates:
        """Every logit of rows ``hidden`` [N, d] of no sequence. Raises as `candidates`."""
        return self._decide(hidden, RowTable.of([Need("dense")] * len(hidden)))

    def open(self, sequence: int, request: Request, history: list[int]) -> None:
        """A new sequence, whose ``history`` the caller keeps up to date. For heads elsewhere, as
        the next two: where states are shared, there is nothing to tell."""

    def append(self, sequence: int, *token_ids: int) -> None:
        """Tokens have been added to a sequence's history."""

    def close(self, sequence: int) -> None:
        """A sequence has ended."""

    def roles(self) -> list[RunningRole]:
        """The shards there are: one, here."""
        return [RunningRole("shard", 0, here(), "as the body", f"{self.vocabulary_size} tokens")]

    def shut_down(self) -> None:
        """The head will not be asked again."""

    def _decide(
        self,
        hidden: torch.Tensor,
        rows: RowTable,
        names: RowNames | None = None,
    ) -> Candidates:
        """For heads that must be told more (`actors.head.sharded`)."""
        return self.head.rescore(self.head.screen(hidden, rows))
