"""One case of the head benchmark: a batch size and a need, all contenders taking turns."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import Certificate
from lexshard.kernels.draw import draw
from lexshard.kernels.rows import canonical_logits, postprocess
from lexshard.loadtest.bench.head.contenders import OURS, HeadContender, HeadStep
from lexshard.loadtest.bench.head.workload import HeadWorkload, SamplingMethod, controls, needs
from lexshard.loadtest.bench.record import (
    CaseLabels,
    Measure,
    Report,
    format_number,
    format_table,
    percentile,
)

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
class HeadCase:
    """One batch size and need: the figures of every contender, one per run."""

    workload: HeadWorkload
    method: SamplingMethod
    batch: int
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    megabytes: dict[str, list[float]] = field(default_factory=dict)
    certificates: list[Certificate] = field(default_factory=list)
    tokens: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)  # by step
    equal: int = 0
    compared: int = 0

    def step(self, number: int) -> HeadStep:
        return HeadStep(
            hidden=self.workload.states(number, self.batch),
            method=self.method,
            needs=needs(self.method, self.batch, number),
            controls=controls(self.method, self.batch, number),
        )

    def take_turns(self, contenders: Sequence[HeadContender], runs: int) -> None:
        """``runs`` steps of every contender, after two unmeasured ones of each."""
        self.milliseconds = {contender.name: [] for contender in contenders}
        self.megabytes = {contender.name: [] for contender in contenders}
        gc.collect()
        gc.freeze()  # so that no contender pays for walking the imports of all
        try:
            for number in range(WARM_UP + runs):
                step = self.step(number)
                for contender in contenders:
                    self._measure(contender, step, number)
        finally:
            gc.unfreeze()

    def _measure(self, contender: HeadContender, step: HeadStep, number: int) -> None:
        started = time.perf_counter()
        answer = contender.answer(step)
        elapsed = time.perf_counter() - started
        if number < WARM_UP:
            return
        self.milliseconds[contender.name].append(1e3 * elapsed)
        self.megabytes[contender.name].append(answer.bytes_read / 1e6)
        if contender.name == OURS:
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

    def record(self, report: Report, labels: CaseLabels) -> None:
        report.add(labels, TIME, self.milliseconds, ours=OURS)
        report.add(labels, BYTES, self.megabytes, ours=OURS)
        report.add(labels, BANDWIDTH, {name: self.bandwidths(name) for name in self.milliseconds})
        certificates = self.certificates
        report.add(labels, RESCORED, {OURS: [float(each.rescored_rows) for each in certificates]})
        report.add(labels, TIGHTNESS, {OURS: [each.tightness for each in certificates]})
        report.add(labels, CERTIFIED, {OURS: [self.certified]})
        report.add(labels, FALLBACK, {OURS: [self.fallback]})
        report.add(labels, EQUAL, {OURS: [100.0 * self.equal / self.compared]})


def table(cases: Sequence[HeadCase], report: Report) -> str:
    """A line per case and contender; the ratios are those of the report's last cases."""
    ratios = {
        (each.case["batch"], each.case["need"], each.against): f"{each.ratio:.2f}x"
        for each in report.ratios
        if each.case["measure"] == TIME.name
    }
    rows = []
    for case in cases:
        rescored = [float(each.rescored_rows) for each in case.certificates]
        for name, times in case.milliseconds.items():
            own = [""] * 5
            if name == OURS:
                own = [
                    format_number(sum(rescored) / len(rescored)),
                    f"{percentile([each.tightness for each in case.certificates], 50):.3f}",
                    case.guarantees,
                    f"{case.fallback:.0f}%",
                    case.tiers,
                ]
            rows.append(
                [
                    str(case.batch),
                    case.method.name,
                    name,
                    *(format_number(each) for each in (percentile(times, 50), min(times))),
                    format_number(percentile(case.megabytes[name], 50)),
                    format_number(percentile(case.bandwidths(name), 50)),
                    ratios.get((case.batch, case.method.name, name), ""),
                    *own,
                ]
            )
    headers = ["batch", "need", "of", "ms", "best", "MB", "GB/s", "we are"]
    headers += ["rescored", "tightness", "guarantee", "fallback", "tier"]
    return format_table(headers, rows)
