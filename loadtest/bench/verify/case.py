"""One case of the verification benchmark: contenders taking turns on the same drafts."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lexshard.loadtest.bench.record import (
    CaseLabels,
    Measure,
    Report,
    format_number,
    format_table,
    paired_ratio,
    percentile,
)
from lexshard.loadtest.bench.verify.approximation import drafter_distances, sigmoid_errors
from lexshard.loadtest.bench.verify.contenders import (
    EXACT,
    READ,
    SIGMOID,
    OwnContender,
    VerifyContender,
)
from lexshard.loadtest.bench.verify.memory import peak_memory
from lexshard.loadtest.bench.verify.workload import VerifyStep

TIME = Measure("time", "ms", higher_is_better=False)
BYTES = Measure("inputs read", "MB", higher_is_better=False)
MEMORY = Measure("peak memory beyond the inputs", "MB", higher_is_better=False)
STANDING = Measure("drafts standing", "drafts/sequence", higher_is_better=True)
ERROR = Measure("total variation error", "of 1", higher_is_better=False)
EQUAL = Measure("sequences equal to the reference", "%", higher_is_better=True)


@dataclass(slots=True, eq=False)
class VerifyCase:
    """The figures of every contender: milliseconds per step in each run, the rest of one run."""

    steps: Sequence[VerifyStep]
    labels: CaseLabels
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    megabytes: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    standing: dict[str, float] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    distances: list[float] = field(default_factory=list)
    equal: int = 0
    compared: int = 0

    def take_turns(self, contenders: Sequence[VerifyContender], runs: int) -> None:
        """``runs`` runs of every contender after one that does not count."""
        for contender in contenders:
            contender.prepare(self.steps)
            self._look_at(contender)
            peak = peak_memory(lambda each=contender: each.decide(0))  # type: ignore[misc]
            if peak is not None:
                self.memory[contender.name] = peak / 1e6
        self.milliseconds = {contender.name: [] for contender in contenders}
        gc.collect()
        gc.freeze()  # so that no contender pays for walking the imports of all
        try:
            for _ in range(runs):
                for contender in contenders:
                    started = time.perf_counter()
                    for number in range(len(self.steps)):
                        contender.decide(number)
                    elapsed = time.perf_counter() - started
                    self.milliseconds[contender.name].append(1e3 * elapsed / len(self.steps))
        finally:
            gc.unfreeze()

    def _look_at(self, contender: VerifyContender) -> None:
        """What one run, which is not measured, decides and reads."""
        read, standing = [], []
        for number, step in enumerate(self.steps):
            output = contender.output(contender.decide(number), step)
            if output.bytes_read is not None:
                read.append(output.bytes_read)
            if output.accepted is not None:
                standing.extend(output.accepted.tolist())
        if read:
            self.megabytes[contender.name] = float(np.mean(read)) / 1e6
        if standing:
            self.standing[contender.name] = float(np.mean(standing))

    def compare_with_reference(self, contenders: Sequence[VerifyContender], count: int) -> None:
        """Verdicts of ours on the first ``count`` sequences with those of the plain reference."""
        for contender in contenders:
            if not isinstance(contender, OwnContender):
                continue
            for number, step in enumerate(self.steps[:count]):
                part = step.first(min(count - number * step.batch, step.batch))
                expected = contender.verify(part, "reference").tokens
                found = contender.decide(number).tokens[: len(expected)]
                same = (found == expected).reshape(part.batch, -1).all(axis=1)
                self.equal += int(same.sum())
                self.compared += part.batch
                if (number + 1) * step.batch >= count:
                    break

    def measure_errors(self, limits: Sequence[tuple[float, float]]) -> None:
        """The total variation error of the sigmoids; that of exact is 0."""
        self.distances = drafter_distances(self.steps)
        for alpha, beta in limits:
            name = OwnContender(SIGMOID, (alpha, beta)).name
            self.errors[name] = sigmoid_errors(self.steps, alpha, beta)

    def times_of_reading(self, name: str) -> float:
        """The median over runs of its time over that of reading the inputs once beside it."""
        ours, read = self.milliseconds[name], self.milliseconds[READ]
        return paired_ratio(read, ours, higher_is_better=False)

    def record(self, report: Report) -> None:
        report.add(self.labels, TIME, self.milliseconds, ours=EXACT)
        for measure, values in (
            (BYTES, self.megabytes),
            (MEMORY, self.memory),
            (STANDING, self.standing),
        ):
            report.add(self.labels, measure, {name: [each] for name, each in values.items()})
        report.add(self.labels, ERROR, {**self.errors, "drafter": self.distances})
        if self.compared:
            share = 100.0 * self.equal / self.compared
            report.add(self.labels, EQUAL, {"lexshard": [share]})


def table(cases: Sequence[VerifyCase]) -> str:
    """A line per case and contender; what never varies stands above."""
    keys = list(cases[0].labels)
    varying = [key for key in keys if len({case.labels[key] for case in cases}) > 1]
    heading = ", ".join(f"{key} {cases[0].labels[key]}" for key in keys if key not in varying)
    rows = []
    for case in cases:
        for name, times in case.milliseconds.items():
            errors = case.errors.get(name, [0.0] if name == EXACT else [])
            rows.append(
                [
                    *(str(case.labels[key]) for key in varying),
                    name,
                    *(f"{percentile(times, percent):.3f}" for percent in (50, 10, 90)),
                    f"{case.times_of_reading(name):.2f}x",
                    _faster(case, name),
                    *(
                        format_number(values[name]) if name in values else ""
                        for values in (case.megabytes, case.memory, case.standing)
                    ),
                    f"{np.mean(errors):.4f}" if errors else "",
                ]
            )
    headers = [
        *varying,
        "of",
        "ms/step",
        "p10",
        "p90",
        "of reading",
        "exact is",
        "MB read",
        "peak MB",
        "standing",
        "TV error",
    ]
    return "\n".join([heading, format_table(headers, rows)])


def _faster(case: VerifyCase, name: str) -> str:
    """How many times faster than it exact verification is."""
    if name == EXACT:
        return ""
    ours, theirs = case.milliseconds[EXACT], case.milliseconds[name]
    return f"{paired_ratio(ours, theirs, higher_is_better=False):.2f}x"
