"""One number of shards, batch size and need: the figures of every step, and the split of its time.

A step of several processes is taken three times: by all processes together; by the same shards one
after the other in this process, where each is timed alone; and by processes that only repeat what
they have said (`RecordedShard`), so that nothing but the exchange is left.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lexshard.actors.collective import Operation, Traffic
from lexshard.actors.head.shard_group import ShardGroup
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.states.row_table import RowTable
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report, percentile
from lexshard.loadtest.bench.shards.processes import Rhythm
from lexshard.loadtest.bench.shards.timed_shard import TimedShard
from lexshard.loadtest.bench.shards.workload import ShardWorkload, drawn

WARM_UP = 2
REPEATS = 2  # times that every computed step is repeated

STEP = Measure("step", "ms", higher_is_better=False)
COMPUTE = Measure("compute of the slowest shard, alone", "ms", higher_is_better=False)
OPERATIONS = Measure("collective operations of a step, waiting included", "ms", False)
EXCHANGE = Measure("exchange of a step", "ms", higher_is_better=False)
BUSY = Measure("processor time of the root in an exchange", "ms", higher_is_better=False)
PACKING = Measure("packing, merging and the rest", "ms", higher_is_better=False)
OPERATION = Measure("exchange per operation", "us", higher_is_better=False)
BYTES = Measure("bytes per token and shard", "bytes", higher_is_better=False)
HIDDEN_BYTES = Measure("hidden state per token and shard", "bytes", higher_is_better=False)
RESCORED = Measure("rescored rows of the busiest shard", "rows/token", higher_is_better=False)
CANDIDATES = Measure("candidates", "tokens/token", higher_is_better=False)
WRONG = Measure("tokens that one shard would not say", "tokens", higher_is_better=False)

# Hops that a step waits for: there, or there and back.
HOPS: Mapping[Operation, int] = {"message": 1, "hidden": 1, "maximum": 2, "gather": 1}
Tokens = list[npt.NDArray[np.int64]]  # of every computed step


def rhythm_of(runs: int) -> Rhythm:
    """What shards do in a case of ``runs`` measured steps."""
    computed = WARM_UP + runs
    return Rhythm(computed, REPEATS * computed)


@dataclass(frozen=True, slots=True)
class Counts:
    """What the root's collective has done since another count, or ever."""

    calls: dict[Operation, int]
    microseconds: dict[Operation, float]
    bytes: dict[Operation, int]  # sent and received by the root

    @classmethod
    def of(cls, traffic: Mapping[Operation, Traffic]) -> Counts:
        return cls(
            {name: each.calls for name, each in traffic.items()},
            {name: each.microseconds for name, each in traffic.items()},
            {name: each.bytes_sent + each.bytes_received for name, each in traffic.items()},
        )

    def since(self, before: Counts) -> Counts:
        return Counts(
            {name: count - before.calls[name] for name, count in self.calls.items()},
            {name: each - before.microseconds[name] for name, each in self.microseconds.items()},
            {name: each - before.bytes[name] for name, each in self.bytes.items()},
        )

    @property
    def milliseconds(self) -> float:
        return sum(self.microseconds.values()) / 1e3

    @property
    def hops(self) -> int:
        return sum(hops * self.calls[name] for name, hops in HOPS.items())


@dataclass(slots=True, eq=False)
class ShardCase:
    """The figures of one case. Times are milliseconds of measured steps, except ``operation``."""

    shards: int
    batch: int
    need: str
    step: list[float] = field(default_factory=list)
    operations: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    packing: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # of the root's processor, in a repeated step
    operation: dict[Operation, list[float]] = field(default_factory=dict)  # microseconds of a call
    hops: int = 0  # of the last repeated step
    step_bytes: list[int] = field(default_factory=list)  # of all servers, hidden states apart
    hidden_bytes: int = 0  # of all servers in one step
    rescored: list[float] = field(default_factory=list)  # rows per token, of the busiest shard
    candidates: list[float] = field(default_factory=list)  # per token, of all shards
    guarantees: Counter[str] = field(default_factory=Counter)
    tokens: Tokens = field(default_factory=list)
    wrong: int = 0

    @property
    def others(self) -> int:
        return self.shards - 1

    @property
    def wait(self) -> float:
        """Milliseconds that operations took beyond the bare exchange: for slower shards and, where
        there are fewer cores than processes, for a core."""
        return max(0.0, percentile(self.operations, 50) - percentile(self.exchange, 50))

    @property
    def own_cores(self) -> float:
        """Milliseconds of compute, exchange and packing together: a step, had every shard a core
        of its own. A sum of medians, not something that was run, for more shards than cores."""
        return sum(percentile(each, 50) for each in (self.compute, self.exchange, self.packing))

    @property
    def bytes_per_token(self) -> float:
        """Sent and received per token and server, hidden states apart; 0 for one shard."""
        return percentile(self.step_bytes, 50) / (self.batch * self.others) if self.others else 0.0

    def measure(
        self,
        workload: ShardWorkload,
        head: CollectiveHead,
        alone: Sequence[TimedShard],
        group: ShardGroup,
        rhythm: Rhythm,
    ) -> None:
        """Takes every step of ``rhythm`` with ``head``; ``group`` are the same shards in this
        process, watched by ``alone``."""
        gc.collect()
        gc.freeze()  # so that no step pays for walking all imports
        try:
            for number in range(rhythm.computed):
                self._compute(workload, head, alone, group, number)
            for number in range(rhythm.repeated):
                self._repeat(workload, head, number % rhythm.computed)
        finally:
            gc.unfreeze()

    def _compute(
        self,
        workload: ShardWorkload,
        head: CollectiveHead,
        alone: Sequence[TimedShard],
        group: ShardGroup,
        number: int,
    ) -> None:
        hidden, needs = workload.step(self.need, self.batch, number)
        before = Counts.of(head.traffic)
        started = time.perf_counter()
        found = head.rescore(head.screen(hidden, RowTable.of(needs)))
        elapsed = time.perf_counter() - started
        counts = Counts.of(head.traffic).since(before)
        self.tokens.append(drawn(found, needs))
        for shard in alone:
            shard.start()
        group.rescore(group.screen(hidden, RowTable.of(needs)))
        if number < WARM_UP:
            return
        self.step.append(1e3 * elapsed)
        self.operations.append(counts.milliseconds)
        self.compute.append(max(shard.milliseconds for shard in alone))
        self.rescored.append(max(shard.rescored for shard in alone) / self.batch)
        self.candidates.append(len(found.ids) / self.batch)
        self.hidden_bytes = counts.bytes["hidden"]
        self.step_bytes.append(sum(counts.bytes.values()) - self.hidden_bytes)
        self.guarantees.update(each.guarantee for each in found.certificates)

    def _repeat(self, workload: ShardWorkload, head: CollectiveHead, number: int) -> None:
        hidden, needs = workload.step(self.need, self.batch, number)
        before = Counts.of(head.traffic)
        started, worked = time.perf_counter(), time.process_time()
        head.rescore(head.screen(hidden, RowTable.of(needs)))
        busy = 1e3 * (time.process_time() - worked)
        elapsed = 1e3 * (time.perf_counter() - started)
        if number < WARM_UP:
            return
        counts = Counts.of(head.traffic).since(before)
        self.exchange.append(counts.milliseconds)
        self.packing.append(elapsed - counts.milliseconds)
        self.busy.append(busy)
        self.hops = counts.hops
        for name, calls in counts.calls.items():
            if calls:
                self.operation.setdefault(name, []).append(counts.microseconds[name] / calls)

    def compare(self, single: ShardCase) -> None:
        """Counts the tokens that are not those of one shard with every row."""
        pairs = zip(self.tokens, single.tokens, strict=True)
        self.wrong = sum(int(np.count_nonzero(own != other)) for own, other in pairs)

    def record(self, report: Report, labels: CaseLabels) -> None:
        own: CaseLabels = {
            **labels,
            "shards": self.shards,
            "batch": self.batch,
            "need": self.need,
            "guarantees": " ".join(name for name, _ in self.guarantees.most_common()),
        }
        per_token = self.batch * self.others
        figures: list[tuple[Measure, Sequence[float]]] = [
            (STEP, self.step),
            (COMPUTE, self.compute),
            (RESCORED, self.rescored),
            (CANDIDATES, self.candidates),
            (WRONG, [self.wrong]),
        ]
        if self.others:
            figures += [
                (OPERATIONS, self.operations),
                (EXCHANGE, self.exchange),
                (PACKING, self.packing),
                (BUSY, self.busy),
                (BYTES, [each / per_token for each in self.step_bytes]),
                (HIDDEN_BYTES, [self.hidden_bytes / per_token]),
            ]
            report.add(own, OPERATION, {str(name): each for name, each in self.operation.items()})
        for measure, values in figures:
            report.add(own, measure, {"shards": values})
