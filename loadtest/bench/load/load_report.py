"""The report of a load: the house's results, and every request's timeline for the page's plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lexshard.loadtest.bench.load.figures import COMPARED, LATENCIES, Objective, faults, figures
from lexshard.loadtest.bench.load.timeline import LoadRun
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report, format_number, format_table

_COLUMNS = {  # measures of the table on the terminal; the JSON file has all of them
    "answered": "answered",
    "errors": "errors",
    "requests/s": "req/s",
    "output tokens/s": "tok/s",
    "TTFT median": "TTFT p50",
    "TTFT p99": "p99",
    "TPOT median": "TPOT p50",
    "ITL median": "ITL p50",
    "ITL p99": "p99",
    "E2E median": "E2E p50",
    "goodput": "goodput",
    "most in flight": "in flight",
    "client late p99": "late p99",
}


@dataclass(slots=True)
class LoadReport(Report):
    """``runs`` are what the results were computed from; ``warnings`` what a reader of them must
    know."""

    runs: list[LoadRun] = field(default_factory=list)
    objectives: tuple[Objective, ...] = ()
    warnings: list[str] = field(default_factory=list)

    def add_runs(self, case: CaseLabels, runs: Sequence[LoadRun], *, ours: str) -> None:
        """Runs of one case, which took turns on its endpoints."""
        self.runs += runs
        raw: dict[Measure, dict[str, list[float]]] = {}
        for run in runs:
            for measure, value in figures(run, self.objectives).items():
                raw.setdefault(measure, {}).setdefault(run.endpoint, []).append(value)
            for reason, count in faults(run):
                self.warnings.append(f"{self._place(run)}: {count} x {reason}")
        for measure, values in raw.items():
            self.add(
                case, measure, values, ours=ours if _is_compared(measure, values, ours) else None
            )

    @property
    def late_runs(self) -> int:
        return sum("THE CLIENT WAS LATE" in each for each in self.warnings)

    def tell(self, limit_ms: float, measures: Sequence[str]) -> None:
        """Notes ratios of those ``measures`` and all warnings, among which are the runs whose
        client sent or noticed later than the limit."""
        for run in self.runs:
            found = {each.name: value for each, value in figures(run, ()).items()}
            sent, noticed = found["client late p99"], found["client loop delay p99"]
            if max(sent, noticed) > limit_ms:
                self.warnings.append(
                    f"{self._place(run)}: THE CLIENT WAS LATE: p99 {sent:.1f} ms to send, "
                    f"{noticed:.1f} ms to notice (limit {limit_ms:g}): its figures are not the "
                    "server's alone"
                )
        self.notes.append(
            "Milliseconds; requests and tokens per second; medians where there are several runs."
        )
        for ratio in self.ratios:
            if ratio.case["measure"] in measures:
                place = f"rate {ratio.case['rate']}, {ratio.case['measure']}"
                self.notes.append(f"{place}: {ratio.ratio:.2f}x against {ratio.against}")
        self.notes += [f"! {each}" for each in self.warnings]

    def as_json(self) -> dict[str, Any]:
        return {
            **Report.as_json(self),
            "objectives": [str(each) for each in self.objectives],
            "warnings": self.warnings,
            "load": [each.as_json() for each in self.runs],
        }

    def table(self) -> str:
        """The few figures of every case and endpoint that fit a terminal: medians over runs."""
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for each in self.results:
            row = cells.setdefault((str(each.case["rate"]), each.name), {})
            row[str(each.case["measure"])] = format_number(each.median)
        shown = {
            key: head for key, head in _COLUMNS.items() if any(key in row for row in cells.values())
        }
        rows = [
            [*place, *(row.get(measure, "-") for measure in shown)] for place, row in cells.items()
        ]
        return format_table(["rate", "of", *shown.values()], rows)

    @staticmethod
    def _place(run: LoadRun) -> str:
        return f"{run.endpoint}, rate {run.rate}, run {run.run + 1}"


def _is_compared(measure: Measure, values: dict[str, list[float]], ours: str) -> bool:
    """Only what every run of every endpoint has, and has above 0, is paired."""
    named = measure.name in COMPARED or measure.name.partition(" ")[0] in LATENCIES
    paired = len({len(each) for each in values.values()}) == 1
    return named and paired and ours in values and all(min(each) > 0 for each in values.values())
