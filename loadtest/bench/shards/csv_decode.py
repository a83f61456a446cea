"""CSV-Decode's exchange beside the ladder's, on the same head and steps: what travels, what is
opened, and how often every logit is needed after all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lexshard.actors.head.sharded.build import cluster_of_rows
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, cut_head
from lexshard.actors.states.row_table import RowTable
from lexshard.cluster.topology.assignment import assign
from lexshard.kernels.bounds import Clusters, summarise
from lexshard.kernels.clustering import cluster
from lexshard.loadtest.bench.record import (
    CaseLabels,
    Measure,
    Report,
    format_number,
    format_table,
    percentile,
)
from lexshard.loadtest.bench.shards.case import (
    BYTES,
    STEP,
    WARM_UP,
    WRONG,
    Counts,
    ShardCase,
    Tokens,
)
from lexshard.loadtest.bench.shards.workload import ShardWorkload, drawn

ITERATIONS = 5  # of k-means
OPENED = Measure("rows opened", "share", higher_is_better=False)
DENSE = Measure("rows that need every logit", "share", higher_is_better=False)


@dataclass(slots=True, eq=False)
class CsvDecodeCase:
    """The figures of one case with CSV-Decode's exchange."""

    shards: int
    batch: int
    need: str
    step: list[float] = field(default_factory=list)  # milliseconds
    step_bytes: list[int] = field(default_factory=list)  # of all servers, hidden states apart
    opened: list[float] = field(default_factory=list)  # share of the vocabulary, per row
    dense: list[float] = field(default_factory=list)  # 1 for rows that fell back
    tokens: Tokens = field(default_factory=list)
    wrong: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Sent and received per token and server, hidden states apart."""
        return percentile(self.step_bytes, 50) / (self.batch * (self.shards - 1))

    def measure(self, workload: ShardWorkload, head: CollectiveHead, computed: int) -> None:
        """Takes the ``computed`` steps that the ladder's case takes."""
        for number in range(computed):
            hidden, needs = workload.step(self.need, self.batch, number)
            before = Counts.of(head.traffic)
            started = time.perf_counter()
            found = head.rescore(head.screen(hidden, RowTable.of(needs)))
            elapsed = 1e3 * (time.perf_counter() - started)
            counts = Counts.of(head.traffic).since(before)
            self.tokens.append(drawn(found, needs))
            if number < WARM_UP:
                continue
            self.step.append(elapsed)
            self.step_bytes.append(sum(counts.bytes.values()) - counts.bytes["hidden"])
            self.opened += [each.opened_share for each in found.certificates]
            self.dense += [float(each.guarantee == "dense") for each in found.certificates]

    def compare(self, single: ShardCase) -> None:
        """Counts the tokens that are not those of one shard with every row."""
        pairs = zip(self.tokens, single.tokens, strict=True)
        self.wrong = sum(int(np.count_nonzero(own != other)) for own, other in pairs)

    def record(self, report: Report, labels: CaseLabels) -> None:
        own: CaseLabels = {
            **labels,
            "exchange": "csv-decode",
            "shards": self.shards,
            "batch": self.batch,
            "need": self.need,
        }
        per_token = self.batch * (self.shards - 1)
        figures: list[tuple[Measure, Sequence[float]]] = [
            (STEP, self.step),
            (BYTES, [each / per_token for each in self.step_bytes]),
            (OPENED, self.opened),
            (DENSE, self.dense),
            (WRONG, [self.wrong]),
        ]
        for measure, values in figures:
            report.add(own, measure, {"shards": values})


def clustered_head(workload: ShardWorkload, count: int) -> tuple[ShardPart, Clusters]:
    """The whole head of ``workload`` in ``count`` clusters of k-means."""
    [whole] = workload.parts(1)
    order, offsets = cluster(whole.weight, count, iterations=ITERATIONS)
    clusters = summarise(whole.weight, whole.bias, order, offsets)
    return replace(whole, tiers=(), clusters=cluster_of_rows(clusters)), clusters


def cluster_parts(head: tuple[ShardPart, Clusters], shards: int) -> list[ShardPart]:
    """Whole clusters of a head dealt out in turn."""
    whole, clusters = head
    size = whole.owned.vocabulary_size
    assignment = assign("clusters-round-robin", size, shards, clusters=clusters)
    return cut_head(whole, [assignment.owned(shard) for shard in range(shards)])


def exchange_table(
    cases: Sequence[CsvDecodeCase], ladders: Mapping[tuple[int, int, str], ShardCase]
) -> str:
    """A line per case: CSV-Decode's exchange against the ladder's of the same steps."""
    headers = ["shards", "batch", "need", "bytes", "the ladder's", "step ms", "the ladder's"]
    rows = []
    for case in cases:
        ladder = ladders[case.shards, case.batch, case.need]
        rows.append(
            [
                str(case.shards),
                str(case.batch),
                case.need,
                f"{case.bytes_per_token:,.0f}",
                f"{ladder.bytes_per_token:,.0f}",
                format_number(percentile(case.step, 50)),
                format_number(percentile(ladder.step, 50)),
                f"{100 * float(np.mean(case.opened)):.1f}%",
                f"{100 * float(np.mean(case.dense)):.1f}%",
                str(case.wrong),
            ]
        )
    return format_table([*headers, "opened", "every logit", "wrong"], rows)
