"""A shard that computes a few steps and then says the same again at no cost.

What is left of a step of such shards is the exchange: the same messages of the same lengths, and
nobody to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.exchange import MassShard, MassTries
from lexshard.actors.head.output_head import Hidden, Thresholds
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.sharded.rounds import AnyShard
from lexshard.actors.head.whole_softmax import PartialMass
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.mass import Outline


@dataclass(slots=True, eq=False)
class RecordedStep:
    """Everything that a shard has said in one step."""

    thresholds: Thresholds
    mass_rows: list[int] = field(default_factory=list)
    mass_tries: MassTries | None = None
    outlines: dict[bool, list[Outline | None]] = field(default_factory=dict)
    bounds: dict[bool, list[PartialMass]] = field(default_factory=dict)
    candidates: Candidates | None = None


def recorded(shard: AnyShard, computed: int, repeated: int) -> AnyShard:
    """``shard`` as a `RecordedShard`; one of clusters as it is, for it repeats nothing."""
    if isinstance(shard, PaperHead):
        return shard
    return RecordedShard(shard, computed, repeated)


class RecordedShard:
    """Of ``computed + repeated`` steps the first are ``shard``'s own, the others repeat them in
    turn; then it begins anew. All shards of a head must count alike."""

    def __init__(self, shard: MassShard, computed: int, repeated: int) -> None:
        self.vocabulary_size = shard.vocabulary_size
        self._shard = shard
        self._computed = computed
        self._period = computed + repeated
        self._number = -1
        self._steps: list[RecordedStep] = []
        self._precisely = False

    @property
    def _repeats(self) -> bool:
        return self._number >= self._computed

    @property
    def _step(self) -> RecordedStep:
        return self._steps[self._number % self._computed]

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        self._number = (self._number + 1) % self._period
        if self._number == 0:
            self._steps = []
        if not self._repeats:
            self._steps.append(RecordedStep(self._shard.screen(hidden, rows)))
        return self._step.thresholds

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        if not self._repeats:
            self._step.mass_rows = self._shard.mass_rows(thresholds)
        return self._step.mass_rows

    def mass_tries(self, thresholds: Thresholds) -> MassTries:
        if not self._repeats:
            self._step.mass_tries = self._shard.mass_tries(thresholds)
        assert self._step.mass_tries is not None
        return self._step.mass_tries

    def outline_masses(
        self, thresholds: Thresholds, rows: Sequence[int], *, precisely: bool
    ) -> list[Outline | None]:
        self._precisely = precisely
        if not self._repeats:
            found = self._shard.outline_masses(thresholds, rows, precisely=precisely)
            self._step.outlines[precisely] = found
        return self._step.outlines[precisely]

    def bound_masses(self, thresholds: Thresholds, lowest: Mapping[int, int]) -> list[PartialMass]:
        if not self._repeats:
            self._step.bounds[self._precisely] = self._shard.bound_masses(thresholds, lowest)
        return self._step.bounds[self._precisely]

    def record_bounds(self, thresholds: Thresholds, *, failed: bool) -> None:
        if not self._repeats:
            self._shard.record_bounds(thresholds, failed=failed)

    def record_masses(self, *, failed: bool) -> None:
        if not self._repeats:
            self._shard.record_masses(failed=failed)

    def rescore(self, thresholds: Thresholds) -> Candidates:
        if not self._repeats:
            self._step.candidates = self._shard.rescore(thresholds)
        assert self._step.candidates is not None
        return self._step.candidates
