"""Does a process of the server grow while it works? Memory, descriptors and threads over time."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import psutil

from lexshard.loadtest.chaos.report import ChaosRow
from lexshard.loadtest.chaos.server import SERVING, ServerUnderTest, role_of

MEBIBYTE = 1 << 20
LEFT_OUT = 0.1  # of the time, in the beginning
MOST_MEMORY, MOST_MEMORY_SHARE = 32 * MEBIBYTE, 0.1  # whichever is more
MOST_DESCRIPTORS, MOST_THREADS = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process held at a moment, or on average."""

    when: float
    memory: float
    descriptors: float
    threads: float

    @classmethod
    def mean(cls, uses: Sequence[ProcessUse]) -> ProcessUse:
        return cls(
            fmean(use.when for use in uses),
            fmean(use.memory for use in uses),
            fmean(use.descriptors for use in uses),
            fmean(use.threads for use in uses),
        )


@dataclass(frozen=True, slots=True)
class ProcessGrowth:
    """The means of the first and the last third of the time."""

    first: ProcessUse
    last: ProcessUse

    @classmethod
    def of(cls, uses: Sequence[ProcessUse]) -> ProcessGrowth | None:
        """None for a process that was not there all the time."""
        settled = uses[int(LEFT_OUT * len(uses)) :]
        third = len(settled) // 3
        if not third:
            return None
        return cls(ProcessUse.mean(settled[:third]), ProcessUse.mean(settled[-third:]))

    def __str__(self) -> str:
        first, last = self.first, self.last
        return (
            f"RSS {first.memory / MEBIBYTE:.1f} -> {last.memory / MEBIBYTE:.1f} MiB, "
            f"descriptors {first.descriptors:.1f} -> {last.descriptors:.1f}, "
            f"threads {first.threads:.1f} -> {last.threads:.1f}"
        )

    @property
    def too_much(self) -> bool:
        first, last = self.first, self.last
        allowed = max(MOST_MEMORY, MOST_MEMORY_SHARE * first.memory)
        return (
            last.memory - first.memory > allowed
            or last.descriptors - first.descriptors > MOST_DESCRIPTORS
            or last.threads - first.threads > MOST_THREADS
        )


class GrowthWatch:
    """Looks at every process of a server from time to time."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._roles: dict[int, str] = {}
        self._uses: dict[int, list[ProcessUse]] = defaultdict(list)
        self._looks = 0

    async def look_on(self, pause: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(pause)

    def look(self) -> None:
        self._looks += 1
        for process in self._server.tree():
            try:
                use = ProcessUse(
                    time.monotonic(),
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                )
            except psutil.Error:  # it has ended meanwhile
                continue
            self._roles.setdefault(process.pid, role_of(process))
            self._uses[process.pid].append(use)

    def rows(self, part: str) -> list[ChaosRow]:
        """A row per process that serves, and for each other one that has grown too much."""
        rows = []
        for pid, uses in self._uses.items():
            growth = ProcessGrowth.of(uses) if len(uses) > self._looks // 2 else None
            role = self._roles[pid]
            if growth is None or (role not in SERVING and not growth.too_much):
                continue
            row = ChaosRow(part, f"growth: {role}", note=str(growth))
            row.expect(not growth.too_much, f"it grows: {growth}")
            first = uses[0].when
            row.details["seconds, bytes, descriptors, threads"] = [
                (round(use.when - first, 1), use.memory, use.descriptors, use.threads)
                for use in uses
            ]
            rows.append(row)
        return rows
