"""One case of the sampler benchmark: all sides taking turns, and whether they decide the same."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernels.draw import Controls, draw
from loadtest.bench.record import (
    Case,
    Measure,
    Ratio,
    Report,
    format_number,
    format_table,
    paired_ratio,
    percentile,
)
from loadtest.bench.sampler_scene import Scene
from loadtest.bench.sampler_sides import (
    CANDIDATES,
    COLD,
    HOT,
    NAIVE,
    OURS,
    VLLM,
    Side,
    TorchSide,
    VllmSide,
)

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
class Cell:
    """The figures of every side, one per run of some steps; see `steps_per_run`."""

    scene: Scene
    case: Case
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

    def take_turns(self, sides: Sequence[Side], runs: int) -> None:
        """``runs`` runs of every side after an unmeasured one; sets are compared before and
        after."""
        size = steps_per_run(self.scene.batch)
        self._compare_sets(sides, 0)
        gc.collect()
        gc.freeze()  # so that no side pays for walking the imports of all
        try:
            for run in range(runs + 1):
                for side in sides:
                    steps = range(run * size, (run + 1) * size)
                    self._measure(side, steps, measured=run > 0)
        finally:
            gc.unfreeze()
        self._compare_sets(sides, (runs + 1) * size)

    def _measure(self, side: Side, steps: range, *, measured: bool) -> None:
        seconds = []
        for step, (elapsed, tokens) in zip(steps, side.take(steps), strict=True):
            seconds.append(elapsed)
            if tokens is not None:
                self.tokens.setdefault(side.name, {})[step] = tokens
        if measured:
            rows = len(steps) * self.scene.batch
            self.milliseconds.setdefault(side.name, []).append(1e3 * sum(seconds) / rows)
            self.largest.setdefault(side.name, []).append(1e3 * max(seconds))

    def _compare_sets(self, sides: Sequence[Side], step: int) -> None:
        port = next((side for side in sides if side.name == NAIVE), None)
        if self.scene.setting.greedy or not isinstance(port, TorchSide):
            return
        kept = port.kept(step)
        self.sets.setdefault("ours", Sets()).add(kept, self.scene.kept(step))
        for side in sides:
            if isinstance(side, VllmSide):
                self.sets.setdefault(VLLM, Sets()).add(kept, side.kept(step))

    def compare_tokens(self, steps: int) -> None:
        """Every side of ours with the plain draw from all adjusted logits, on ``steps`` steps, and
        with each other on all."""
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
        scene, setting, rows = self.scene, self.scene.setting, self.scene.batch
        size = scene.vocabulary_size
        scale = 0.0 if setting.greedy else float(np.float32(1 / setting.temperature))
        return draw(
            np.tile(np.arange(size, dtype=np.int32), rows),
            scene.adjusted(step).reshape(-1),
            np.arange(rows + 1, dtype=np.int64) * size,
            Controls(
                inverse_temperature=np.full(rows, scale),
                top_k=np.full(rows, setting.top_k, np.int64),
                top_p=np.full(rows, setting.top_p),
                log_min_p=np.full(rows, np.log(setting.min_p) if setting.min_p else -np.inf),
                key=np.arange(rows, dtype=np.uint64),
                position=np.full(rows, scene.history + step, np.uint64),
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
        report.add(self.case, TIME, self.milliseconds)
        throughput = {name: self.throughput(name) for name in self.milliseconds}
        report.add(self.case, THROUGHPUT, throughput)
        report.add(self.case, LARGEST, self.largest)
        for name in self.milliseconds:
            if self.baseline in self.milliseconds and name != self.baseline:
                case = {**self.case, "measure": TIME.name, "of": name}
                report.ratios.append(Ratio(case, self.baseline, self.ratio(name)))
        if self.hot_size is not None:
            report.add(self.case, HOT_SIZE, {HOT: [float(self.hot_size)]})
        shares = {name: [100.0 * sets.equal / sets.rows] for name, sets in self.sets.items()}
        report.add(self.case, SAME_SETS, shares)
        if self.compared:
            share = 100.0 * self.equal / self.compared
            report.add(self.case, SAME_TOKENS, {"lexshard": [share]})


def table(cells: Sequence[Cell]) -> str:
    """A line per case and side; what never varies stands above."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.case))
    varying = [key for key in keys if len({cell.case[key] for cell in cells}) > 1]
    heading = ", ".join(f"{key} {cells[0].case[key]}" for key in keys if key not in varying)
    rows = []
    for cell in cells:
        for name, times in cell.milliseconds.items():
            rows.append(
                [
                    *(str(cell.case[key]) for key in varying),
                    name,
                    cell.tokens_looked_at(name),
                    *(f"{percentile(times, percent):.4f}" for percent in (50, 10, 90)),
                    f"{min(times):.4f}",
                    f"{max(cell.largest[name]):.3f}",
                    format_number(percentile(cell.throughput(name), 50)),
                    cell.faster(name),
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


def candidates_per_row(scene: Scene) -> float:
    """The mean number of tokens that certificates leave in step 0."""
    return float(np.mean([len(ids) for ids in scene.candidates(0)]))
