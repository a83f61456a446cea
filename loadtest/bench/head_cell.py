"""One case of the head benchmark: a batch size and a need, all sides taking turns."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.messages import Certificate
from kernels.draw import draw
from kernels.rows import canonical_logits, postprocess
from loadtest.bench.head_sides import OURS, Side, Step
from loadtest.bench.head_workload import Kind, Workload, controls, needs
from loadtest.bench.record import Case, Measure, Report, format_number, format_table, percentile

WARM_UP = 2

TIME = Measure("time", "ms", higher_is_better=False)
BYTES = Measure("bytes read", "MB", higher_is_better=False)
BANDWIDTH = Measure("bandwidth", "GB/s", higher_is_better=True)
RESCORED = Measure("rescored rows", "rows/token", higher_is_better=False)
TIGHTNESS = Measure("tightness", "of 1", higher_is_better=True)
CERTIFIED = Measure("certified", "%", higher_is_better=True)
FALLBACK = Measure("fallback", "%", higher_is_better=False)
EQUAL = Measure("tokens equal to canonical dense", "%", higher_is_better=True)


@dataclass(slots=True, eq=False)
class Cell:
    """One batch size and need: the figures of every side, one per run."""

    workload: Workload
    kind: Kind
    batch: int
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    megabytes: dict[str, list[float]] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)
    tokens: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)  # by step
    equal: int = 0
    compared: int = 0

    def step(self, number: int) -> Step:
        return Step(
            hidden=self.workload.states(number, self.batch),
            kind=self.kind,
            needs=needs(self.kind, self.batch, number),
            controls=controls(self.kind, self.batch, number),
        )

    def take_turns(self, sides: Sequence[Side], runs: int) -> None:
        """``runs`` steps of every side, after two unmeasured ones of each."""
        self.milliseconds = {side.name: [] for side in sides}
        self.megabytes = {side.name: [] for side in sides}
        gc.collect()
        gc.freeze()  # so that no side pays for walking the imports of all
        try:
            for number in range(WARM_UP + runs):
                step = self.step(number)
                for side in sides:
                    self._measure(side, step, number)
        finally:
            gc.unfreeze()

    def _measure(self, side: Side, step: Step, number: int) -> None:
        started = time.perf_counter()
        answer = side.answer(step)
        elapsed = time.perf_counter() - started
        if number < WARM_UP:
            return
        self.milliseconds[side.name].append(1e3 * elapsed)
        self.megabytes[side.name].append(answer.bytes_read / 1e6)
        if side.name == OURS:
            self.certificates.extend(answer.certificates)
            self.tokens[number] = answer.tokens

    def compare_with_canonical(self, steps: int) -> None:
        """Draw the tokens of ``steps`` measured steps from the canonical logits of every row."""
        workload = self.workload
        size = len(workload.weight)
        bias = None if workload.bias is None else workload.bias.numpy()
        offsets = np.arange(self.batch + 1, dtype=np.int64) * size
        ids = np.tile(np.arange(size, dtype=np.int32), self.batch)
        for number in list(self.tokens)[:steps]:
            step = self.step(number)
            raw = canonical_logits(step.hidden, workload.weight)
            logits = postprocess(raw, bias=bias, scale=workload.scale, softcap=workload.softcap)
            expected = draw(ids, logits.reshape(-1), offsets, step.controls)
            self.equal += int(np.count_nonzero(expected == self.tokens[number]))
            self.compared += self.batch

    def share(self, true_of: Callable[[Certificate], bool]) -> float:
        """Of all certificates, in percent."""
        return 100.0 * sum(map(true_of, self.certificates)) / len(self.certificates)

    @property
    def certified(self) -> float:
        return self.share(lambda each: each.guarantee in ("deterministic", "probabilistic"))

    @property
    def fallback(self) -> float:
        return self.share(lambda each: each.fallback)

    @property
    def guarantees(self) -> str:
        """The guarantees given, most frequent first."""
        counts = Counter(each.guarantee for each in self.certificates)
        return " ".join(name for name, _ in counts.most_common())

    @property
    def tiers(self) -> str:
        """The tiers that screened, most frequent first."""
        counts = Counter(each.tier for each in self.certificates)
        return " ".join(name for name, _ in counts.most_common())

    def bandwidths(self, name: str) -> list[float]:
        """GB/s of every run."""
        pairs = zip(self.megabytes[name], self.milliseconds[name], strict=True)
        return [size / elapsed for size, elapsed in pairs]

    def record(self, report: Report, case: Case) -> None:
        report.add(case, TIME, self.milliseconds, ours=OURS)
        report.add(case, BYTES, self.megabytes, ours=OURS)
        report.add(case, BANDWIDTH, {name: self.bandwidths(name) for name in self.milliseconds})
        certificates = self.certificates
        report.add(case, RESCORED, {OURS: [float(each.rescored_rows) for each in certificates]})
        report.add(case, TIGHTNESS, {OURS: [each.tightness for each in certificates]})
        report.add(case, CERTIFIED, {OURS: [self.certified]})
        report.add(case, FALLBACK, {OURS: [self.fallback]})
        report.add(case, EQUAL, {OURS: [100.0 * self.equal / self.compared]})


def table(cells: Sequence[Cell], report: Report) -> str:
    """A line per case and side; the ratios are those of the report's last cases."""
    ratios = {
        (each.case["batch"], each.case["need"], each.against): f"{each.ratio:.2f}x"
        for each in report.ratios
        if each.case["measure"] == TIME.name
    }
    rows = []
    for cell in cells:
        rescored = [float(each.rescored_rows) for each in cell.certificates]
        for name, times in cell.milliseconds.items():
            own = [""] * 5
            if name == OURS:
                own = [
                    format_number(sum(rescored) / len(rescored)),
                    f"{percentile([each.tightness for each in cell.certificates], 50):.3f}",
                    cell.guarantees,
                    f"{cell.fallback:.0f}%",
                    cell.tiers,
                ]
            rows.append(
                [
                    str(cell.batch),
                    cell.kind.name,
                    name,
                    *(format_number(each) for each in (percentile(times, 50), min(times))),
                    format_number(percentile(cell.megabytes[name], 50)),
                    format_number(percentile(cell.bandwidths(name), 50)),
                    ratios.get((cell.batch, cell.kind.name, name), ""),
                    *own,
                ]
            )
    headers = ["batch", "need", "of", "ms", "best", "MB", "GB/s", "we are"]
    headers += ["rescored", "tightness", "guarantee", "fallback", "tier"]
    return format_table(headers, rows)
