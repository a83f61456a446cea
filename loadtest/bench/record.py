"""What a benchmark writes down: results, paired ratios, the table and the JSON file.

A *case* says what was measured (its last entry is the measure), a *name* who was measured. A ratio
above 1 says that we are that many times better, whichever direction is better for the measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
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
    notes: list[str] = field(default_factory=list)  # lines below the table, in no file

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
            "date": date.today().isoformat(),
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
        """A line per case and name with the median of every measure, beside it how many times
        better ours is; case entries that never vary stand above the table."""
        cases = [
            {key: each.case[key] for key in each.case if key != "measure"} for each in self.results
        ]
        keys = list(dict.fromkeys(key for case in cases for key in case))
        varying = [key for key in keys if len({case.get(key) for case in cases}) > 1]
        heading = [f"{key} {cases[0][key]}" for key in keys if key not in varying]
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for case, each in zip(cases, self.results, strict=True):
            place = (*(str(case.get(key, "")) for key in varying), each.name)
            name = f"{each.case['measure']}, {each.unit}"
            lines.setdefault(place, {})[name] = format_number(each.median) + self._ratio_to(each)
        measures = list(dict.fromkeys(name for line in lines.values() for name in line))
        rows = [
            [*place, *(line.get(name, "") for name in measures)] for place, line in lines.items()
        ]
        table = format_table([*varying, "of", *measures], rows)
        return "\n".join([*([", ".join(heading)] if heading else []), table])

    def _ratio_to(self, result: BenchmarkResult) -> str:
        named = {**result.case, "of": result.name}  # of a line to a common baseline
        for each in self.ratios:
            if each.case == named or (each.against == result.name and each.case == result.case):
                return f" ({each.ratio:.2f}x)"
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
    """At least three significant digits, without an exponent."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    digits = 1 if size >= 10 else 2 if size >= 0.1 else min(6, 2 - math.floor(math.log10(size)))
    return f"{value:.{digits}f}"


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
    return not text.strip("0123456789.,-+x ()")
