"""What is looked at while a server is attacked: its health, what its processes hold, and what is
left afterwards.

    python -m lexshard.loadtest.chaos.watch URL

asks for ``/health`` all the time, in a process that nothing else keeps busy, and prints when it
asked, how long the answer took, its status (0: none) and what it says.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import psutil

from lexshard.loadtest.bench.record import percentile
from lexshard.loadtest.bench.servers.processes import role_of
from lexshard.loadtest.bench.servers.running import RunningServer
from lexshard.loadtest.chaos.report import ChaosRow
from lexshard.loadtest.client import once

MEBIBYTE = 1 << 20
PAUSE_SECONDS, GIVE_UP_SECONDS = 0.1, 15.0
REST_SECONDS = 10.0
HEALTH_SECONDS = 1.0
GAUGES = (
    "lexshard_running",
    "lexshard_waiting",
    "lexshard_kv_blocks_used",
    "lexshard_admitted_sequences",
    "lexshard_admitted_waiting_tokens",
)
# Those there must be as many of after an attack as before.
SERVING = (
    *("engine", "shard", "sampler", "API process", "Serve's controller", "HAProxy's manager"),
    "HAProxy",
)
LEFT_OUT = 0.1  # of the time, in the beginning
# What a process may have grown by: bytes (or a tenth, whichever is more), descriptors, threads.
MOST_GROWTH, MOST_SHARE = (32.0 * MEBIBYTE, 10.0, 5.0), 0.1


@dataclass(frozen=True, slots=True)
class Look:
    """One question: when (of the monotonic clock), seconds until the answer, status, words."""

    when: float
    seconds: float
    status: int
    words: str = ""

    @property
    def answered(self) -> float:
        return self.when + self.seconds


class HealthWatch:
    """``async with``: asks until the end; ``looks`` grows meanwhile."""

    def __init__(self, url: str) -> None:
        self.looks: list[Look] = []
        self._url = url

    async def __aenter__(self) -> HealthWatch:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lexshard.loadtest.chaos.watch", self._url),
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.ensure_future(self._read())
        while not self.looks and not self._reading.done():
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.terminate()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            when, seconds, status, words = line.decode(errors="replace").split(" ", maxsplit=3)
            self.looks.append(Look(float(when), float(seconds), int(status), words.strip()))

    def since(self, moment: float) -> list[Look]:
        return [look for look in self.looks if look.answered >= moment]

    def slowest_since(self, moment: float) -> float:
        return max((look.seconds for look in self.since(moment)), default=0.0)

    def latencies(self) -> str:
        """The middle, the 99th percentile and the slowest, in milliseconds."""
        milliseconds = [1e3 * look.seconds for look in self.looks]
        middle, high = percentile(milliseconds, 50), percentile(milliseconds, 99)
        return f"p50 {middle:.1f} ms, p99 {high:.1f} ms, slowest {max(milliseconds):.1f} ms"


Held = tuple[float, float, float]  # bytes, descriptors, threads


class GrowthWatch:
    """Looks at what every process of a server holds from time to time."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._roles: dict[int, str] = {}
        self._uses: dict[int, list[Held]] = defaultdict(list)
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
                held = process.memory_info().rss, process.num_fds(), process.num_threads()
                self._roles.setdefault(process.pid, role_of(process))
            except psutil.Error:  # it has ended meanwhile
                continue
            self._uses[process.pid].append(held)

    def rows(self, part: str) -> list[ChaosRow]:
        """A row per process that serves, and for each other one that has grown too much."""
        rows = []
        for pid, uses in self._uses.items():
            if len(uses) <= self._looks // 2 or (found := growth(uses)) is None:
                continue
            first, last, too_much = found
            if self._roles[pid] not in SERVING and not too_much:
                continue
            told = (
                f"RSS {first[0] / MEBIBYTE:.1f} -> {last[0] / MEBIBYTE:.1f} MiB, descriptors "
                f"{first[1]:.1f} -> {last[1]:.1f}, threads {first[2]:.1f} -> {last[2]:.1f}"
            )
            row = ChaosRow(part, f"growth: {self._roles[pid]}", note=told)
            row.expect(not too_much, f"it grows: {told}")
            rows.append(row)
        return rows


def growth(uses: Sequence[Held]) -> tuple[Held, Held, bool] | None:
    """The means of the first and the last third of the time, and whether that is too much growth;
    None for a process that was not there long enough."""
    settled = uses[int(LEFT_OUT * len(uses)) :]
    third = len(settled) // 3
    if not third:
        return None
    ends = (settled[:third], settled[-third:])
    first, last = ((*(fmean(each) for each in zip(*some, strict=True)),) for some in ends)
    allowed = (max(MOST_GROWTH[0], MOST_SHARE * first[0]), *MOST_GROWTH[1:])
    too_much = any(b - a > most for a, b, most in zip(first, last, allowed, strict=True))
    return first, last, too_much  # type: ignore[return-value]


def memory(server: RunningServer) -> int:
    """Resident bytes of all of its processes."""
    held = 0
    for process in server.tree():
        try:
            held += process.memory_info().rss
        except psutil.Error:
            continue
    return held


async def expect_idle(server: RunningServer, row: ChaosRow) -> None:
    """Every gauge of what is held goes back to zero within seconds."""
    deadline = time.monotonic() + REST_SECONDS
    while (held := await _held(server)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    row.expect(not held, f"after {REST_SECONDS:.0f} s of rest there is still {held}")


async def expect_unharmed(server: RunningServer, before: dict[int, str], row: ChaosRow) -> None:
    """It is idle, and still has the serving processes of ``before`` (`RunningServer.roles`)."""
    await expect_idle(server, row)
    now = server.roles()
    lost = sorted(role for pid, role in before.items() if role in SERVING and pid not in now)
    row.expect(not lost, f"processes that have ended: {', '.join(lost)}")
    tracebacks = sum("Traceback (most recent call last)" in line for _, line in server.lines)
    row.note = f"{tracebacks} tracebacks in the log"


async def _held(server: RunningServer) -> dict[str, float]:
    answer = await once(server.url, "/metrics", seconds=5.0)
    if answer.status != 200:
        return {answer.fault or f"status {answer.status}": 1.0}
    lines = answer.body.decode().splitlines()
    samples = (line.rsplit(maxsplit=1) for line in lines if line[:1] != "#")
    values = {name.partition("{")[0]: value for name, value in samples}
    return {name: held for name in GAUGES if (held := float(values.get(name, "nan")))}


async def watch(url: str) -> None:
    """Asks until it is ended."""
    while True:
        when = time.monotonic()
        answer = await once(url, "/health", seconds=GIVE_UP_SECONDS)
        words = " ".join((answer.fault or answer.body.decode(errors="replace")).split())
        took = time.monotonic() - when
        print(f"{when:.6f} {took:.6f} {answer.status} {words}", flush=True)
        await asyncio.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    asyncio.run(watch(sys.argv[1]))
