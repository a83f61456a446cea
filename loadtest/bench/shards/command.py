"""``lexshard bench shards``: an output head in 1, 2, 4 and 8 processes, and a model of more.

Shards are processes on this machine that speak over gloo, each pinned to a core. Every step's time
is split into compute, wait and exchange (see ``case``); the tokens are compared with those of one
shard. Then a MODEL, never a measurement, says what published figures of GPUs and links would give
for up to 64 shards (see ``model``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import product
from statistics import median

import torch

from lexshard.actors.head.shard_group import ShardGroup
from lexshard.actors.head.sharded.part import build_ladder
from lexshard.loadtest.bench.head.workload import synthetic_workload
from lexshard.loadtest.bench.measurement import (
    on_pinned_cores,
    run_measurement,
)
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.shards.case import ShardCase, rhythm_of
from lexshard.loadtest.bench.shards.csv_decode import (
    CsvDecodeCase,
    cluster_parts,
    clustered_head,
    exchange_table,
)
from lexshard.loadtest.bench.shards.fitted_link import fit_link
from lexshard.loadtest.bench.shards.model import HeadSize, models
from lexshard.loadtest.bench.shards.options import CANDIDATES, QUICK_RUNS, RESCORED, RUNS
from lexshard.loadtest.bench.shards.processes import shard_processes
from lexshard.loadtest.bench.shards.published import Link
from lexshard.loadtest.bench.shards.tables import (
    MODELLED,
    describe_link,
    explanation,
    model_table,
    operation_table,
    step_table,
)
from lexshard.loadtest.bench.shards.timed_shard import TimedShard
from lexshard.loadtest.bench.shards.workload import ShardWorkload

MODEL_STEP = Measure("MODEL of a step, not measured", "us", higher_is_better=False)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_measurement("shards", arguments, measure_into, "tokens")


def measure_into(report: Report, arguments: argparse.Namespace) -> int:
    """Measures what the options ask for, prints the model; returns how many tokens are wrong."""
    cases: list[ShardCase] = []
    clustered: list[CsvDecodeCase] = []
    cores: list[int] = []
    if not arguments.model_only:
        allowed = sorted(os.sched_getaffinity(0))
        with on_pinned_cores(report, 1) as [own]:
            cores = [own, *(core for core in allowed if core != own)]
            report.machine["pinned_to_cores"] = cores
            cases, clustered = measure_shards(report, arguments, cores)
        print(f"\n{step_table(cases, arguments.vocabulary, len(cores))}\n")
        print(f"{explanation(cases, len(cores))}\n")
        print(f"microseconds of a call, nobody computing:\n{operation_table(cases)}\n")
    if clustered:
        ladders = {(each.shards, each.batch, each.need): each for each in cases}
        print(
            "CSV-Decode's exchange of cluster bounds and opened logits, bytes per token and shard"
        )
        print(f"without hidden states:\n{exchange_table(clustered, ladders)}\n")
    links = list(arguments.link)
    fitted = fit_link(cases, len(cores))
    if fitted is not None:
        links.append(fitted)
    print_model(report, arguments, links, cases)
    return sum(each.wrong for each in cases) + sum(each.wrong for each in clustered)


def measure_shards(
    report: Report, arguments: argparse.Namespace, cores: Sequence[int]
) -> tuple[list[ShardCase], list[CsvDecodeCase]]:
    """Every number of shards, batch size and need; one shard first, whose tokens are right. With
    ``clusters`` several shards again, with CSV-Decode's exchange."""
    workload = ShardWorkload(
        synthetic_workload(
            arguments.geometry,
            arguments.vocabulary,
            arguments.columns,
            torch.bfloat16,
            arguments.seed,
        ),
        arguments.tier,
        max(arguments.batch),
    )
    labels: CaseLabels = {
        "head": workload.head.name,
        "V": arguments.vocabulary,
        "d": arguments.columns,
        "tier": arguments.tier,
        "cores": len(cores),
    }
    rhythm = rhythm_of(arguments.runs or (QUICK_RUNS if arguments.quick else RUNS))
    cases: list[ShardCase] = []
    clustered: list[CsvDecodeCase] = []
    in_clusters = clustered_head(workload, arguments.clusters) if arguments.clusters else None
    single: dict[tuple[int, str], ShardCase] = {}  # one shard's, by batch and need
    counts = sorted({1, *arguments.shards})
    with shard_processes(counts[-1] - 1, cores) as processes:
        for shards in counts:
            parts = workload.parts(shards)
            alone = [TimedShard(build_ladder(part)) for part in parts]
            group = ShardGroup(alone, [part.owned.ids for part in parts])
            with processes.head(parts, rhythm) as head:
                for asked in product(arguments.batch, arguments.need):
                    case = ShardCase(shards, *asked)
                    case.measure(workload, head, alone, group, rhythm)
                    case.compare(single.setdefault(asked, case))
                    case.record(report, labels)
                    cases.append(case)
            if in_clusters is not None and shards > 1:
                with processes.head(cluster_parts(in_clusters, shards), rhythm) as head:
                    for asked in product(arguments.batch, arguments.need):
                        other = CsvDecodeCase(shards, *asked)
                        other.measure(workload, head, rhythm.computed)
                        other.compare(single[asked])
                        other.record(report, labels)
                        clustered.append(other)
            print(f"{shards} shard(s) measured", flush=True)
    return cases, clustered


def print_model(
    report: Report,
    arguments: argparse.Namespace,
    links: Sequence[Link],
    cases: Sequence[ShardCase],
) -> None:
    """The model of every head and link, marked as what it is. What a search leaves is that of the
    top-50 of most shards among ``cases``, unless options say otherwise."""
    candidates, rescored = CANDIDATES, RESCORED
    for case in cases:
        if case.need == "top50":
            candidates, rescored = median(case.candidates), median(case.rescored)
    if arguments.candidates is not None:
        candidates = arguments.candidates
    if arguments.rescored is not None:
        rescored = arguments.rescored
    heads = [
        HeadSize(vocabulary, columns, arguments.model_batch, candidates, rescored)
        for vocabulary, columns in arguments.model_head
    ]
    found = models(heads, links, 1e9 * arguments.memory_bandwidth)
    print("A MODEL, NOT A MEASUREMENT: microseconds of a step of N shards on GPUs (and how many")
    print(f"times faster than one), batch {arguments.model_batch}, top-50, int8 screen, memory of")
    print(f"{arguments.memory_bandwidth:,.0f} GB/s each, links at their peak; per token")
    print(f"{candidates:.0f} candidates and, on every shard, {rescored:.0f} rescored rows:")
    print(model_table(found))
    print("half of N at N: the most shards that make a step at least N / 2 times faster; fastest")
    print("at N: more than that make it slower (64 are looked at). Links of the MODEL:")
    for link in links:
        print(f"  {describe_link(link)}")
    for each in found:
        labels: CaseLabels = {
            "V": each.head.vocabulary,
            "d": each.head.columns,
            "batch": each.head.batch,
            "link": describe_link(each.link),
            "fastest at": each.fastest(),
            "half of N at": each.worth_it(),
        }
        for shards in MODELLED:
            report.add({**labels, "shards": shards}, MODEL_STEP, {"model": [each.step(shards)]})
