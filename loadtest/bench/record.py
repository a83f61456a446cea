"""What a benchmark writes down: results, paired ratios, the table and the JSON file.

    report = Report(describe_machine(), installed_versions(), command, seed)
    report.add({"requests": 16}, THROUGHPUT, {"lexshard": [..], "peer": [..]}, ours="lexshard")
    print(report.table())
    report.write(path)

A *case* says what was measured (its last entry is the measure), a *name* who was measured. A ratio
above 1 says that we are that many times better, whichever direction is better for the measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CaseLabels = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that is measured: its name, unit and which direction is better."""

    name: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The runs of one name in one case."""

    case: CaseLabels
    name: str
    unit: str
    raw: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.raw, 50)

    @property
    def p10(self) -> float:
        return percentile(self.raw, 10)

    @property
    def p90(self) -> float:
        return percentile(self.raw, 90)

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "p10": self.p10,
            "p90": self.p90,
            "runs": len(self.raw),
            "raw": list(self.raw),
        }


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better than ``against`` we are in a case (median of the paired ratios)."""

    case: CaseLabels
    against: str
    ratio: float

    def as_json(self) -> dict[str, Any]:
        return {"case": self.case, "against": self.against, "ratio": self.ratio}


@dataclass(slots=True)
class Report:
    """Everything one invocation of a benchmark measured."""

    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    seed: int
    results: list[BenchmarkResult] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)

    def add(
        self,
        case: CaseLabels,
        measure: Measure,
        raw: Mapping[str, Sequence[float]],
        *,
        ours: str | None = None,
    ) -> None:
        """Record each name's runs of a measure; with ``ours``, its ratio to every other name.

        Run ``i`` of every name must have been taken next to run ``i`` of the others. Raises
        ValueError where a ratio is wanted and the numbers of runs differ.
        """
        measured = {**case, "measure": measure.name}
        for name, values in raw.items():
            self.results.append(BenchmarkResult(measured, name, measure.unit, tuple(values)))
        if ours is None:
            return
        for name, values in raw.items():
            if name != ours:
                ratio = paired_ratio(raw[ours], values, higher_is_better=measure.higher_is_better)
                self.ratios.append(Ratio(measured, name, ratio))

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "versions": self.versions,
            "command": self.command,
            "seed": self.seed,
            "results": [each.as_json() for each in self.results],
            "ratios": [each.as_json() for each in self.ratios],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One line per result or ratio: thousands of runs would be a line each.
        parts = []
        for key, value in self.as_json().items():
            text = json.dumps(value)
            if isinstance(value, list) and value:
                text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
            parts.append(f" {json.dumps(key)}: {text}")
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    def table(self) -> str:
        """One line per result; case entries that never vary stand above the table."""
        constant = {
            key: value
            for key, value in (self.results[0].case if self.results else {}).items()
            if all(each.case.get(key) == value for each in self.results)
        }
        columns = list(
            dict.fromkeys(key for each in self.results for key in each.case if key not in constant)
        )
        rows = [
            [
                *(str(each.case.get(key, "")) for key in columns),
                each.name,
                *(format_number(value) for value in (each.median, each.p10, each.p90)),
                each.unit,
                str(len(each.raw)),
                self._ratio_to(each),
            ]
            for each in self.results
        ]
        headers = [*columns, "of", "median", "p10", "p90", "unit", "runs", "we are"]
        heading = ", ".join(f"{key} {value}" for key, value in constant.items())
        return "\n".join([*([heading] if heading else []), format_table(headers, rows)])

    def _ratio_to(self, result: BenchmarkResult) -> str:
        for each in self.ratios:
            if each.against == result.name and each.case == result.case:
                return f"{each.ratio:.2f}x"
        return ""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of a non-empty sample, linear between its order statistics."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool
) -> float:
    """The median over runs of how many times better ours is than the run taken beside it.

    Pairing keeps a slow minute of the machine, which hits both, out of the ratio.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} runs cannot be paired with {len(theirs)}")
    pairs = zip(ours, theirs, strict=True)
    return percentile([a / b if higher_is_better else b / a for a, b in pairs], 50)


def format_number(value: float) -> str:
    """Three or four significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    numeric = [
        bool(rows) and all(_is_number(row[column]) for row in rows)
        for column in range(len(headers))
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), "  ".join("-" * width for width in widths), *map(line, rows)])


def _is_number(text: str) -> bool:
    return not text.strip("0123456789.,-+x")
