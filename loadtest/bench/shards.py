"""``lexshard bench shards``: an output head in 1, 2, 4 and 8 processes.

A step is taken three times: by all processes together; by the same shards one after the other in
this process, where each is timed alone; and by processes that only repeat what they have said, so
that nothing but the exchange is left. The tokens are compared with those of one shard.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import Operation
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_ladder, cut_head
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.cluster.topology.assignment import assign
from lexshard.kernels.draw import draw
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup
from lexshard.loadtest.bench.contenders.shard_processes import TimedShard, shard_processes
from lexshard.loadtest.bench.frame import frozen_garbage, run_bench
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report, percentile
from lexshard.loadtest.bench.synthetic.head_workload import (
    SAMPLING_METHODS,
    HeadWorkload,
    needs,
    synthetic_workload,
)

WARM_UP = 2
REPEATS = 2  # times that every computed step is repeated

STEP = Measure("step", "ms", higher_is_better=False)
COMPUTE = Measure("compute of the slowest shard, alone", "ms", higher_is_better=False)
OPERATIONS = Measure("collective operations of a step, waiting included", "ms", False)
EXCHANGE = Measure("exchange of a step", "ms", higher_is_better=False)
PACKING = Measure("packing, merging and the rest", "ms", higher_is_better=False)
OWN_CORES = Measure("own cores", "ms", higher_is_better=False)
OPERATION = Measure("exchange per operation", "us", higher_is_better=False)
BYTES = Measure("bytes per token and shard", "bytes", higher_is_better=False)
HIDDEN_BYTES = Measure("hidden state per token and shard", "bytes", higher_is_better=False)
WRONG = Measure("tokens that one shard would not say", "tokens", higher_is_better=False)
NOTES = """\
step: all processes together. compute: screen, bounds and rescoring of the slowest shard, each timed
alone in this process. exchange: the collective operations of processes that repeat what they said
without computing, same messages. packing: at the root of the same. own cores: compute + exchange +
packing, a sum of medians, not something that was run. bytes: sent and received, hidden states
apart. Where there are fewer cores than shards, processes run in turns: their steps, operations and
exchanges are NOT those of a cluster."""


# By name; at temperature 1 a synthetic head has no nucleus that bounds could decide.
NEEDS = {
    **{name: SAMPLING_METHODS[name] for name in ("greedy", "gumbel", "top50")},
    "top-p": Need("nucleus", top_p=0.9, inverse_temperature=1 / 0.3),
}


class Count(NamedTuple):
    """What the root's collective has done of one operation."""

    calls: int
    microseconds: float
    bytes: int  # sent and received by the root


def counted(head: CollectiveHead) -> dict[Operation, Count]:
    """What there was of every operation so far."""
    return {
        name: Count(each.calls, each.microseconds, each.bytes_sent + each.bytes_received)
        for name, each in head.traffic.items()
    }


def counted_since(
    head: CollectiveHead, before: Mapping[Operation, Count]
) -> tuple[dict[Operation, Count], float]:
    """The same of a step, and the milliseconds of it all."""
    step: dict[Operation, Count] = {}
    for name, now in counted(head).items():
        calls, microseconds, size = before[name]
        step[name] = Count(now.calls - calls, now.microseconds - microseconds, now.bytes - size)
    return step, sum(each.microseconds for each in step.values()) / 1e3


@dataclass(slots=True, eq=False)
class ShardCase:
    """One number of shards, batch size and need: figures of every step by their measure."""

    shards: int
    batch: int
    need: str
    figures: dict[Measure, list[float]] = field(default_factory=dict)
    operation: dict[Operation, list[float]] = field(default_factory=dict)  # microseconds of a call
    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)  # of every computed step

    def compute(
        self,
        head: CollectiveHead,
        alone: Sequence[TimedShard],
        group: ShardGroup,
        step: MeasuredStep,
    ) -> None:
        """A step of all processes together, and of the same shards in this one."""
        before, started = counted(head), time.perf_counter()
        found = head.candidates(step.hidden, RowTable.of(step.needs))
        elapsed = 1e3 * (time.perf_counter() - started)
        counts, milliseconds = counted_since(head, before)
        self.tokens.append(drawn(found, step.needs))
        for shard in alone:
            shard.milliseconds = 0.0
        group.rescore(group.screen(step.hidden, RowTable.of(step.needs)))
        if step.number < WARM_UP:
            return
        self._add(STEP, elapsed)
        self._add(COMPUTE, max(shard.milliseconds for shard in alone))
        if self.shards > 1:
            per_token = self.batch * (self.shards - 1)
            hidden, every = counts["hidden"].bytes, sum(each.bytes for each in counts.values())
            self._add(OPERATIONS, milliseconds)
            self._add(BYTES, (every - hidden) / per_token)
            self._add(HIDDEN_BYTES, hidden / per_token)

    def repeat(self, head: CollectiveHead, step: MeasuredStep) -> None:
        """A step of which nothing is computed."""
        before, started = counted(head), time.perf_counter()
        head.candidates(step.hidden, RowTable.of(step.needs))
        elapsed = 1e3 * (time.perf_counter() - started)
        counts, milliseconds = counted_since(head, before)
        if step.number < WARM_UP or self.shards == 1:
            return
        self._add(EXCHANGE, milliseconds)
        self._add(PACKING, elapsed - milliseconds)
        for name, each in counts.items():
            if each.calls:
                self.operation.setdefault(name, []).append(each.microseconds / each.calls)

    def wrong(self, single: ShardCase) -> int:
        """How many tokens are not those of one shard with every row."""
        pairs = zip(self.tokens, single.tokens, strict=True)
        return sum(int(np.count_nonzero(own != other)) for own, other in pairs)

    def record(self, report: Report, labels: CaseLabels, wrong: int) -> None:
        own: CaseLabels = {
            **labels,
            "shards": self.shards,
            "batch": self.batch,
            "need": self.need,
        }
        for measure, values in self.figures.items():
            report.add(own, measure, {"shards": values})
        if self.shards > 1:
            parts = (COMPUTE, EXCHANGE, PACKING)
            together = sum(percentile(self.figures[each], 50) for each in parts)
            report.add(own, OWN_CORES, {"shards": [together]})
            report.add(own, OPERATION, {str(name): each for name, each in self.operation.items()})
        report.add(own, WRONG, {"shards": [wrong]})

    def _add(self, measure: Measure, value: float) -> None:
        self.figures.setdefault(measure, []).append(value)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStep:
    """Hidden states [batch, d] and needs of a step; every step has others."""

    number: int
    hidden: npt.NDArray[np.float32]
    needs: list[Need]


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_bench("shards", arguments, measure, checked="tokens", threads=1)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every number of shards, batch size and need; one shard first, whose tokens are right. Returns
    how many tokens are wrong."""
    [own] = report.machine["pinned_to_cores"]
    cores = [own, *(core for core in range(os.cpu_count() or 1) if core != own)]
    report.machine["pinned_to_cores"] = cores
    shape = (arguments.vocabulary, arguments.columns, torch.bfloat16, arguments.seed)
    workload = synthetic_workload(*shape)
    labels: CaseLabels = {
        "V": arguments.vocabulary,
        "d": arguments.columns,
        "tier": arguments.tier,
        "cores": len(cores),
    }
    computed = WARM_UP + arguments.runs
    rhythm = (computed, REPEATS * computed)
    single: dict[tuple[int, str], ShardCase] = {}  # one shard's, by batch and need
    wrong = 0
    counts = sorted({1, *arguments.shards})
    with shard_processes(counts[-1] - 1, cores) as processes:
        for shards in counts:
            parts = parts_of(workload, arguments.tier, max(arguments.batch), shards)
            alone = [TimedShard(build_ladder(part)) for part in parts]
            group = ShardGroup(alone, [part.owned.ids for part in parts])
            with processes.head(parts, *rhythm) as head, frozen_garbage():
                for batch, need in product(arguments.batch, arguments.need):
                    case = ShardCase(shards, batch, need)
                    steps = [step_of(workload, need, batch, number) for number in range(computed)]
                    for step in steps:
                        case.compute(head, alone, group, step)
                    for step in REPEATS * steps:
                        case.repeat(head, step)
                    differing = case.wrong(single.setdefault((batch, need), case))
                    case.record(report, labels, differing)
                    wrong += differing
            print(f"{shards} shard(s) measured", flush=True)
    report.notes.append(NOTES)
    return wrong


def step_of(workload: HeadWorkload, need: str, batch: int, number: int) -> MeasuredStep:
    states = workload.states(number, batch)
    return MeasuredStep(number, states, needs(NEEDS[need], batch, number))


def parts_of(head: HeadWorkload, tier: Any, largest: int, shards: int) -> list[ShardPart]:
    """The head in as many shards, blocks of 64 tokens dealt out in turn."""
    size = len(head.weight)
    whole = ShardPart(
        weight=head.weight,
        bias=None,
        softcap=None,
        scale=1.0,
        owned=OwnedRows.every(size),
        eos_ids=(0,),
        largest=largest,
        tiers=(tier,),
    )
    return cut_head(whole, assign("blocks-round-robin", size, shards).owned)


def drawn(found: Candidates, asked: Sequence[Need]) -> npt.NDArray[np.int64]:
    """The token [N] that each row's candidates give, by the served noise."""
    controls = RowTable.of(asked).controls
    cut = np.array([each.truncated for each in found.certificates])  # to their nucleus, already
    controls = controls._replace(top_p=np.where(cut, 1.0, controls.top_p))
    return draw(found.ids, found.logits, found.offsets, controls)
