"""What a campaign finds: a row per case, one table, the promises that were broken."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from lexshard.loadtest.bench.record import format_table

_COUNTS = ("requests", "kept", "refused", "cut", "wrong")
_SECONDS = ("noticed", "recovered", "slowest")


@dataclass(slots=True)
class ChaosRow:
    """One case: what became of its requests and, of a fault, the seconds until it was noticed and
    until requests were served again."""

    part: str
    case: str
    requests: int = 0
    kept: int = 0
    refused: int = 0
    cut: int = 0
    wrong: int = 0
    noticed: float | None = None
    recovered: float | None = None
    slowest: float | None = None
    note: str = ""
    broken: list[str] = field(default_factory=list)

    def expect(self, fulfilled: bool, otherwise: str) -> None:
        """A promise; ``otherwise`` says how it was broken."""
        if not fulfilled:
            self.broken.append(otherwise)

    def break_promise(self, reason: str) -> None:
        """A request whose answer is wrong: ``KIND | EXAMPLE``, see `counted`."""
        self.wrong += 1
        self.broken.append(reason)

    def count(self, status: int) -> None:
        """An answer by its status, 0 where there was none; one that fits nowhere is counted by what
        judges it."""
        self.cut += not status
        self.kept += 200 <= status < 300
        self.refused += 400 <= status < 500 or status == 503

    def cells(self) -> list[str]:
        counts = [getattr(self, name) for name in _COUNTS]
        seconds = [getattr(self, name) for name in _SECONDS]
        return [
            self.part,
            self.case,
            *(f"{count:,}" if self.requests else "" for count in counts),
            *("" if each is None else f"{each:.2f}" for each in seconds),
            "BROKEN" if self.broken else "kept",
            self.note,
        ]


@dataclass(slots=True)
class ChaosReport:
    """Everything one campaign has found so far."""

    machine: dict[str, Any]
    versions: dict[str, str]
    command: str
    seed: int
    rows: list[ChaosRow] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, row: ChaosRow) -> None:
        """Takes a row in, what was broken alike as one line, and says so."""
        row.broken = counted(row.broken)
        self.rows.append(row)
        found = "; ".join([row.note] * bool(row.note) + [f"BROKEN: {each}" for each in row.broken])
        self.tell(row.part, f"{row.case}: {found or 'as promised'}")

    def tell(self, part: str, message: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {part:<8} {message}", flush=True)

    @property
    def broken(self) -> list[str]:
        return [f"{row.part}, {row.case}: {each}" for row in self.rows for each in row.broken]

    def table(self) -> str:
        """All rows, and below them every promise that was broken."""
        seconds = [f"{name} s" for name in _SECONDS]
        headers = ["part", "case", *_COUNTS, *seconds, "promises", "note"]
        lines = [format_table(headers, [row.cells() for row in self.rows]), ""]
        if not self.broken:
            return "\n".join([*lines, "Every promise was kept."])
        return "\n".join([*lines, "Broken:", *(f"  {each}" for each in self.broken)])

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        seconds = time.monotonic() - self.started
        found = {"date": date.today().isoformat(), "seconds": seconds, "broken": self.broken}
        whole = asdict(self) | found
        del whole["started"]  # by a clock of this process
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def counted(reasons: Sequence[str]) -> list[str]:
    """Reasons of the same kind (what stands before the first ``|``) as one line with the first
    example, for thousands of requests may fail alike; those without an example as they are."""
    examples: dict[str, list[str]] = {}
    for reason in reasons:
        kind, _, example = reason.partition(" | ")
        examples.setdefault(kind, []).append(example)
    return [
        f"{kind} ({len(each)} times; {each[0]})" if each[0] else kind
        for kind, each in examples.items()
    ]
