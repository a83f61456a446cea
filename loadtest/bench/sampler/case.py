"""One case of the sampler benchmark: contenders taking turns, and whether they decide the same."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lexshard.kernels.draw import Controls, draw
from lexshard.loadtest.bench.record import (
    CaseLabels,
    Measure,
    Ratio,
    Report,
    format_number,
    format_table,
    paired_ratio,
    percentile,
)
from lexshard.loadtest.bench.sampler.contenders import (
    OURS,
    SamplerContender,
    TorchContender,
    VllmContender,
)
from lexshard.loadtest.bench.sampler.options import CANDIDATES, COLD, HOT, NAIVE, VLLM
from lexshard.loadtest.bench.sampler.workload import SamplerWorkload

TIME = Measure("time per row", "ms", higher_is_better=False)
THROUGHPUT = Measure("throughput of a sampler thread", "tokens/s", higher_is_better=True)
LARGEST = Measure("largest step", "ms", higher_is_better=False)
HOT_SIZE = Measure("hot tokens", "tokens", higher_is_better=False)
SAME_SETS = Measure("rows with the sets of the port", "%", higher_is_better=True)
SAME_TOKENS = Measure("tokens equal to the plain draw", "%", higher_is_better=True)


def steps_per_run(batch: int) -> int:
    """Enough that a run of few rows is not a single moment."""
    return min(max(64 // batch, 2), 32)


@dataclass(slots=True)
class Sets:
    """How many rows keep the same tokens under the port and under another sampler, and how many
    tokens of the others differ."""

    rows: int = 0
    equal: int = 0
    tokens: int = 0

    def add(self, ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> None:
        differs = (ours != theirs).sum(axis=1)
        self.rows += len(ours)
        self.equal += int(np.count_nonzero(differs == 0))
        self.tokens += int(differs.sum())

    def __str__(self) -> str:
        more = f" ({self.tokens} tokens in the others)" if self.tokens else ""
        return f"{self.equal} of {self.rows} rows{more}"


@dataclass(slots=True, eq=False)
class SamplerCase:
    """The figures of every contender, one per run of some steps; see `steps_per_run`."""

    workload: SamplerWorkload
    labels: CaseLabels
    milliseconds: dict[str, list[float]] = field(default_factory=dict)  # per row
    largest: dict[str, list[float]] = field(default_factory=dict)  # of a run's steps
    tokens: dict[str, dict[int, npt.NDArray[np.int64]]] = field(default_factory=dict)
    sets: dict[str, Sets] = field(default_factory=dict)
    hot_size: int | None = None
    candidates: float | None = None  # per row
    equal: int = 0
    compared: int = 0

    @property
    def baseline(self) -> str:
        return VLLM if VLLM in self.milliseconds else NAIVE

    def take_turns(self, contenders: Sequence[SamplerContender], runs: int) -> None:
        """``runs`` runs of every contender after an unmeasured one; sets are compared before and
        after."""
        size = steps_per_run(self.workload.batch)
        self._compare_sets(contenders, 0)
        gc.collect()
        gc.freeze()  # so that no contender pays for walking the imports of all
        try:
            for run in range(runs + 1):
                for contender in contenders:
                    steps = range(run * size, (run + 1) * size)
                    self._measure(contender, steps, measured=run > 0)
        finally:
            gc.unfreeze()
        self._compare_sets(contenders, (runs + 1) * size)

    def _measure(self, contender: SamplerContender, steps: range, *, measured: bool) -> None:
        seconds = []
        for step, (elapsed, tokens) in zip(steps, contender.take(steps), strict=True):
            seconds.append(elapsed)
            if tokens is not None:
                self.tokens.setdefault(contender.name, {})[step] = tokens
        if measured:
            rows = len(steps) * self.workload.batch
            self.milliseconds.setdefault(contender.name, []).append(1e3 * sum(seconds) / rows)
            self.largest.setdefault(contender.name, []).append(1e3 * max(seconds))

    def _compare_sets(self, contenders: Sequence[SamplerContender], step: int) -> None:
        port = next((contender for contender in contenders if contender.name == NAIVE), None)
        if self.workload.setting.greedy or not isinstance(port, TorchContender):
            return
        kept = port.kept(step)
        self.sets.setdefault("ours", Sets()).add(kept, self.workload.kept(step))
        for contender in contenders:
            if isinstance(contender, VllmContender):
                self.sets.setdefault(VLLM, Sets()).add(kept, contender.kept(step))

    def compare_tokens(self, steps: int) -> None:
        """Every contender of ours with the plain draw from all adjusted logits, on ``steps`` steps,
        and with each other on all."""
        found = [self.tokens[name] for name in OURS if name in self.tokens]
        for step in range(steps):
            expected = self._plain_draw(step)
            for tokens in found:
                self._count(expected, tokens[step])
        for step in range(steps, len(found[0]) if found else 0):
            for tokens in found[1:]:
                self._count(found[0][step], tokens[step])

    def _count(self, expected: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        self.equal += int(np.count_nonzero(expected == tokens))
        self.compared += len(expected)

    def _plain_draw(self, step: int) -> npt.NDArray[np.int64]:
        workload, setting, rows = self.workload, self.workload.setting, self.workload.batch
        size = workload.vocabulary_size
        scale = 0.0 if setting.greedy else float(np.float32(1 / setting.temperature))
        return draw(
            np.tile(np.arange(size, dtype=np.int32), rows),
            workload.adjusted(step).reshape(-1),
            np.arange(rows + 1, dtype=np.int64) * size,
            Controls(
                inverse_temperature=np.full(rows, scale),
                top_k=np.full(rows, setting.top_k, np.int64),
                top_p=np.full(rows, setting.top_p),
                log_min_p=np.full(rows, np.log(setting.min_p) if setting.min_p else -np.inf),
                key=np.arange(rows, dtype=np.uint64),
                position=np.full(rows, workload.history + step, np.uint64),
            ),
        )

    def throughput(self, name: str) -> list[float]:
        """Tokens per second of one sampler thread, which has a core of its own."""
        return [1e3 / each for each in self.milliseconds[name]]

    def ratio(self, name: str) -> float:
        """How many times faster than the baseline: the median over runs taken side by side."""
        theirs = self.milliseconds[self.baseline]
        return paired_ratio(self.milliseconds[name], theirs, higher_is_better=False)

    def faster(self, name: str) -> str:
        """`ratio` in words, nothing where there is none."""
        measured = self.baseline in self.milliseconds
        return f"{self.ratio(name):.2f}x" if measured and name != self.baseline else ""

    def tokens_looked_at(self, name: str) -> str:
        """Where that is not the whole vocabulary: hot tokens (first) or candidates per row."""
        if name == HOT and self.hot_size is not None:
            return f"{self.hot_size} hot"
        return f"{self.candidates:.0f}" if name in (CANDIDATES, COLD) and self.candidates else ""

    def record(self, report: Report) -> None:
        report.add(self.labels, TIME, self.milliseconds)
        throughput = {name: self.throughput(name) for name in self.milliseconds}
        report.add(self.labels, THROUGHPUT, throughput)
        report.add(self.labels, LARGEST, self.largest)
        for name in self.milliseconds:
            if self.baseline in self.milliseconds and name != self.baseline:
                labels = {**self.labels, "measure": TIME.name, "of": name}
                report.ratios.append(Ratio(labels, self.baseline, self.ratio(name)))
        if self.hot_size is not None:
            report.add(self.labels, HOT_SIZE, {HOT: [float(self.hot_size)]})
        shares = {name: [100.0 * sets.equal / sets.rows] for name, sets in self.sets.items()}
        report.add(self.labels, SAME_SETS, shares)
        if self.compared:
            share = 100.0 * self.equal / self.compared
            report.add(self.labels, SAME_TOKENS, {"lexshard": [share]})


def table(cases: Sequence[SamplerCase]) -> str:
    """A line per case and contender; what never varies stands above."""
    keys = list(dict.fromkeys(key for case in cases for key in case.labels))
    varying = [key for key in keys if len({case.labels[key] for case in cases}) > 1]
    heading = ", ".join(f"{key} {cases[0].labels[key]}" for key in keys if key not in varying)
    rows = []
    for case in cases:
        for name, times in case.milliseconds.items():
            rows.append(
                [
                    *(str(case.labels[key]) for key in varying),
                    name,
                    case.tokens_looked_at(name),
                    *(f"{percentile(times, percent):.4f}" for percent in (50, 10, 90)),
                    f"{min(times):.4f}",
                    f"{max(case.largest[name]):.3f}",
                    format_number(percentile(case.throughput(name), 50)),
                    case.faster(name),
                ]
            )
    headers = [
        *varying,
        "of",
        "tokens",
        "ms/row",
        "p10",
        "p90",
        "best",
        "largest step",
        "tokens/s",
        "faster",
    ]
    return "\n".join([heading, format_table(headers, rows)])


def candidates_per_row(workload: SamplerWorkload) -> float:
    """The mean number of tokens that certificates leave in step 0."""
    return float(np.mean([len(ids) for ids in workload.candidates(0)]))
