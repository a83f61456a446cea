"""Several samplers at a time: what each still decides when they share a machine.

The rows of a step are split evenly. A step lasts from handing the work to every sampler until all
have answered, so that messages and, for processes, the copy of the logits into shared memory
count. There is one core more than samplers where the machine has it, for the one who asks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from lexshard.actors.decision.local_samplers import ThreadSampler
from lexshard.actors.decision.messages import DecisionWork, DenseRows, SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.states.row_table import RowNames
from lexshard.kernels.decision import block_maxima
from lexshard.loadtest.bench.machine import pinned_to_cores
from lexshard.loadtest.bench.record import (
    CaseLabels,
    Report,
    format_number,
    format_table,
    percentile,
)
from lexshard.loadtest.bench.sampler.case import LARGEST, THROUGHPUT, steps_per_run
from lexshard.loadtest.bench.sampler.messages import appending, candidate_rows, opening
from lexshard.loadtest.bench.sampler.options import CANDIDATES, OFFLOADED, PARALLEL
from lexshard.loadtest.bench.sampler.settings import Setting
from lexshard.loadtest.bench.sampler.torch_sampler import TorchSampler
from lexshard.loadtest.bench.sampler.workload import Pool, SamplerWorkload

THREADS, PROCESSES = "threads", "processes"


class Group(Protocol):
    """``count`` samplers that decide the rows of a workload together."""

    def take(self, step: int) -> float:
        """Seconds until all rows of the step are decided."""
        ...

    def close(self) -> None: ...


class TorchThreads:
    """The naive port, a thread for each part of the rows."""

    def __init__(self, workload: SamplerWorkload, count: int) -> None:
        self._workload = workload
        self._parts = parts(workload.batch, count)
        prompts = torch.from_numpy(workload.prompts)
        self._samplers = [TorchSampler(workload.setting, prompts[part]) for part in self._parts]
        self._outputs: list[list[int]] = workload.outputs.tolist()
        self._threads = ThreadPoolExecutor(count)

    def take(self, step: int) -> float:
        logits = torch.from_numpy(self._workload.logits(step))
        started = time.perf_counter()
        asked = [
            self._threads.submit(sampler.sample, logits[part], self._outputs[part])
            for sampler, part in zip(self._samplers, self._parts, strict=True)
        ]
        for each in asked:
            each.result()
        elapsed = time.perf_counter() - started
        for tokens, token in zip(
            self._outputs, self._workload.appended[step].tolist(), strict=True
        ):
            tokens.append(token)
        return elapsed

    def close(self) -> None:
        self._threads.shutdown()


class OwnSamplers:
    """Ours, on all logits or on candidates."""

    def __init__(
        self,
        workload: SamplerWorkload,
        count: int,
        start: Callable[[SamplerSettings], SamplerHandle],
        *,
        dense: bool,
    ) -> None:
        self._workload = workload
        self._parts = [range(part.start, part.stop) for part in parts(workload.batch, count)]
        self._dense = dense
        settings = SamplerSettings(workload.vocabulary_size, (), capacity=workload.batch)
        self._handles = [start(settings) for _ in self._parts]
        self._deltas = [opening(workload, rows) for rows in self._parts]
        self._slot = np.empty((workload.vocabulary_size, workload.batch), np.float32)

    def take(self, step: int) -> float:
        workload = self._workload
        if self._dense:
            np.copyto(self._slot, workload.logits(step).T)
            maxima = block_maxima(self._slot)
        works = []
        for rows, deltas in zip(self._parts, self._deltas, strict=True):
            if self._dense:
                own = slice(rows.start, rows.stop)
                dense = DenseRows(RowNames(tuple(rows)), self._slot[:, own], maxima[:, own])
                works.append(DecisionWork(step, deltas, dense=dense))
            else:
                candidates = candidate_rows(workload, step, rows)
                works.append(DecisionWork(step, deltas, candidates=candidates))
        started = time.perf_counter()
        pairs = zip(self._handles, works, strict=True)
        asked = [handle.submit(work) for handle, work in pairs]
        for each in asked:
            each.result()
        elapsed = time.perf_counter() - started
        self._deltas = [appending(workload, step, rows) for rows in self._parts]
        return elapsed

    def close(self) -> None:
        for handle in self._handles:
            handle.close()


def parts(batch: int, count: int) -> list[slice]:
    """``count`` nearly equal slices of the rows, none empty."""
    ends = [batch * part // count for part in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]


def measure_scaling(
    report: Report,
    arguments: argparse.Namespace,
    groups: Sequence[tuple[Setting, int, int]],
    runs: int,
    load_pool: Callable[[argparse.Namespace, int | None], Pool],
) -> str:
    """Every case with every number of samplers; returns the table."""
    cores = min(max(arguments.samplers) + 1, len(os.sched_getaffinity(0)))
    rows = []
    with pinned_to_cores(cores):
        for size in (None,) if arguments.model is not None else arguments.vocabulary:
            pool = load_pool(arguments, size)
            for setting, batch, history in groups:
                steps = (runs + 1) * steps_per_run(batch)
                workload = SamplerWorkload(pool, setting, batch, history, steps, arguments.seed)
                for count in arguments.samplers:
                    if count <= batch:
                        rows += _measure(report, workload, count, runs, cores)
    headers = ["V", "controls", "batch", "samplers", "of", "in", "ms/step", "largest step"]
    headers += ["tokens/s each", "tokens/s"]
    return "\n".join([f"several samplers at a time, on {cores} cores", format_table(headers, rows)])


def _measure(
    report: Report, workload: SamplerWorkload, count: int, runs: int, cores: int
) -> list[list[str]]:
    made: dict[tuple[str, str], Group] = {(PARALLEL, THREADS): TorchThreads(workload, count)}
    for place, start in ((THREADS, _thread), (PROCESSES, _process)):
        for name in (OFFLOADED, CANDIDATES):
            made[name, place] = OwnSamplers(workload, count, start, dense=name == OFFLOADED)
    try:
        seconds = _take_turns(made, workload.batch, runs)
    finally:
        for group in made.values():
            group.close()
    rows = []
    for (name, place), steps in seconds.items():
        labels: CaseLabels = {
            "logits": workload.pool.name,
            "V": workload.vocabulary_size,
            "controls": workload.setting.name,
            "batch": workload.batch,
            "history": workload.history,
            "samplers": count,
            "in": place,
            "cores": cores,
        }
        each = [workload.batch / count / (sum(run) / len(run)) for run in steps]
        largest = [1e3 * max(run) for run in steps]
        report.add(labels, THROUGHPUT, {name: each})
        report.add(labels, LARGEST, {name: largest})
        middle = percentile([1e3 * sum(run) / len(run) for run in steps], 50)
        rows.append(
            [
                *map(str, (workload.vocabulary_size, workload.setting.name, workload.batch, count)),
                name,
                place,
                f"{middle:.3f}",
                f"{max(largest):.3f}",
                format_number(percentile(each, 50)),
                format_number(count * percentile(each, 50)),
            ]
        )
    return rows


def _take_turns(
    groups: dict[tuple[str, str], Group], batch: int, runs: int
) -> dict[tuple[str, str], list[list[float]]]:
    """Seconds of every step of every run, after an unmeasured run of each group."""
    size = steps_per_run(batch)
    seconds: dict[tuple[str, str], list[list[float]]] = {key: [] for key in groups}
    gc.collect()
    gc.freeze()
    try:
        for run in range(runs + 1):
            for key, group in groups.items():
                taken = [group.take(step) for step in range(run * size, (run + 1) * size)]
                if run:
                    seconds[key].append(taken)
    finally:
        gc.unfreeze()
    return seconds


def _thread(settings: SamplerSettings) -> SamplerHandle:
    return ThreadSampler(Sampler(settings))


def _process(settings: SamplerSettings) -> SamplerHandle:
    from lexshard.cluster.samplers.process import SamplerProcess

    return SamplerProcess(settings)
