"""How long a shard computes, when nobody else does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.exchange import MassShard, MassTries
from lexshard.actors.head.output_head import Hidden, Thresholds
from lexshard.actors.head.whole_softmax import PartialMass
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.mass import Outline


class TimedShard:
    """``shard`` with a watch: ``milliseconds`` of its screen, bounds and rescoring since
    `start`, and the ``rescored`` rows of the last step."""

    def __init__(self, shard: MassShard) -> None:
        self.vocabulary_size = shard.vocabulary_size
        self.milliseconds = 0.0
        self.rescored = 0
        self._shard = shard

    def start(self) -> None:
        self.milliseconds = 0.0

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        with self._computing():
            return self._shard.screen(hidden, rows)

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        with self._computing():
            return self._shard.mass_rows(thresholds)

    def mass_tries(self, thresholds: Thresholds) -> MassTries:
        return self._shard.mass_tries(thresholds)

    def outline_masses(
        self, thresholds: Thresholds, rows: Sequence[int], *, precisely: bool
    ) -> list[Outline | None]:
        with self._computing():
            return self._shard.outline_masses(thresholds, rows, precisely=precisely)

    def bound_masses(self, thresholds: Thresholds, lowest: Mapping[int, int]) -> list[PartialMass]:
        with self._computing():
            return self._shard.bound_masses(thresholds, lowest)

    def record_bounds(self, thresholds: Thresholds, *, failed: bool) -> None:
        self._shard.record_bounds(thresholds, failed=failed)

    def record_masses(self, *, failed: bool) -> None:
        self._shard.record_masses(failed=failed)

    def rescore(self, thresholds: Thresholds) -> Candidates:
        with self._computing():
            found = self._shard.rescore(thresholds)
        self.rescored = sum(each.rescored_rows for each in found.certificates)
        return found

    @contextmanager
    def _computing(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds += 1e3 * (time.perf_counter() - started)
