"""Processes are killed and stopped under streams: who keeps their text, who is cut, who waits."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from lexshard.loadtest.chaos.afterwards import expect_idle
from lexshard.loadtest.chaos.client import (
    CUT,
    KEPT,
    WRONG,
    Heard,
    SeededRequest,
    difference,
    fate,
    listen,
    new_client,
    seeded_requests,
    undisturbed,
)
from lexshard.loadtest.chaos.health import HealthWatch
from lexshard.loadtest.chaos.newcomers import Newcomers
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow, counted
from lexshard.loadtest.chaos.server import ServerError, ServerUnderTest, alive

PART = "kills"
STREAMS = 40
TOKENS, QUICK_TOKENS = 400, 250
BEGIN_SECONDS = 30.0
SILENCE_SECONDS = 150.0  # the longest that a surviving stream may pause
BACK_SECONDS = 30.0  # until every process is there again
STOPPED_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the process of a role. ``cuts``: streams cannot survive it. ``no_ingress``:
    for a while there is nobody to answer. ``goes_on``: stopped for so long instead of killed."""

    role: str
    number: signal.Signals = signal.SIGKILL
    cuts: bool = False
    no_ingress: bool = False
    goes_on: float | None = None

    @property
    def name(self) -> str:
        after = "" if self.goes_on is None else f", SIGCONT after {self.goes_on:.0f} s"
        return f"{self.role} {self.number.name}{after}"


FAULTS = (
    Fault("engine"),
    Fault("sampler"),
    Fault("engine", signal.SIGSTOP, goes_on=STOPPED_SECONDS),
    Fault("sampler", signal.SIGSTOP),
    Fault("shard"),
    Fault("shard", signal.SIGSTOP),
    Fault("controller"),
    Fault("API process", cuts=True),
    Fault("ingress manager", cuts=True, no_ingress=True),
    Fault("haproxy", cuts=True, no_ingress=True),
)
LAST_FAULTS = ("raylet", "gcs")
QUICK = ("engine SIGKILL", "sampler SIGKILL", "API process SIGKILL", "haproxy SIGKILL")


def last_fault_name(role: str) -> str:
    return f"{role} SIGKILL"


async def run_kills(
    server: ServerUnderTest, report: ChaosReport, *, quick: bool, only: str | None
) -> None:
    """Every fault in turn on one server, or ``only`` one; a row each."""
    requests = seeded_requests(report.seed + 2, STREAMS, QUICK_TOKENS if quick else TOKENS)
    async with new_client(server.url, SILENCE_SECONDS) as client:
        expected = await undisturbed(client, requests, at_once=STREAMS)
        for fault in FAULTS:
            if not server.serving()[fault.role]:  # the server has been given other options
                continue
            if only == fault.name or (only is None and (not quick or fault.name in QUICK)):
                try:
                    report.add(await _strike(server, client, fault, requests, expected))
                except ServerError as error:  # what an earlier one has left
                    report.add(ChaosRow(PART, fault.name, broken=[str(error)]))
    row = ChaosRow(PART, "afterwards", note=f"{server.errors_logged()} tracebacks in the log")
    await expect_idle(server, row)
    report.add(row)


async def _strike(
    server: ServerUnderTest,
    client: httpx.AsyncClient,
    fault: Fault,
    requests: Sequence[SeededRequest],
    expected: Sequence[Heard],
) -> ChaosRow:
    row = ChaosRow(PART, fault.name, requests=len(requests))
    before = server.serving()
    async with HealthWatch(server.port) as watch, Newcomers(server.url) as newcomers:
        heard = [Heard() for _ in requests]
        listening = [
            asyncio.ensure_future(listen(client, request, each))
            for request, each in zip(requests, heard, strict=True)
        ]
        await _until(lambda: all(each.has_begun for each in heard), BEGIN_SECONDS)
        victim = server.find(fault.role)
        struck = time.monotonic()
        victim.send_signal(fault.number)
        if fault.goes_on is not None:
            await asyncio.sleep(fault.goes_on)
            victim.send_signal(signal.SIGCONT)
        mended = time.monotonic() if fault.goes_on is not None else struck
        await newcomers.until_served(watch, mended)
        await asyncio.wait(listening)
        back = await _until(lambda: server.serving() == before, BACK_SECONDS)
        await newcomers.finish()
        newcomers.judge(row, watch, struck, mended, no_ingress=fault.no_ingress)
    judge_streams(row, heard, expected, may_cut=fault.cuts)
    alone = before[fault.role] == 1
    row.expect(alone or row.kept > 0, f"a {fault.role} took the streams of the others along")
    row.expect(back, f"processes are {dict(server.serving())}, were {dict(before)}")
    return row


def judge_streams(
    row: ChaosRow, heard: Sequence[Heard], expected: Sequence[Heard], *, may_cut: bool
) -> None:
    """Counts what became of the streams; none may be wrong, and none cut that could survive."""
    fates = [fate(each, known) for each, known in zip(heard, expected, strict=True)]
    counts = Counter(fates)
    row.kept, row.cut, row.wrong = counts[KEPT], counts[CUT], counts[WRONG]
    reasons = [
        difference(each, known)
        for each, known, result in zip(heard, expected, fates, strict=True)
        if result not in (KEPT, CUT)
    ]
    row.broken.extend(counted(reasons))
    row.wrong = len(reasons)
    if row.cut and not may_cut:
        messages = Counter(
            each.message for each, result in zip(heard, fates, strict=True) if result == CUT
        )
        row.broken.append(f"{row.cut} streams were cut: {messages.most_common(1)[0][0]}")


async def run_last_kill(server: ServerUnderTest, report: ChaosReport, role: str) -> None:
    """Without Ray's ``role`` the whole server is to end, with a code that says so."""
    row = ChaosRow(PART, last_fault_name(role), requests=10)
    requests = seeded_requests(report.seed + 3, row.requests, 1000)
    heard = [Heard() for _ in requests]
    async with new_client(server.url, SILENCE_SECONDS) as client:
        listening = [
            asyncio.ensure_future(listen(client, request, each))
            for request, each in zip(requests, heard, strict=True)
        ]
        await _until(lambda: all(each.has_begun for each in heard), BEGIN_SECONDS)
        processes = server.tree()
        struck = time.monotonic()
        server.find(role).kill()
        ended = await _until(lambda: server.process.poll() is not None, BEGIN_SECONDS)
        row.noticed = time.monotonic() - struck
        row.expect(ended, f"the server has not ended after {BEGIN_SECONDS:.0f} s")
        row.expect(server.process.poll() != 0, "the server ended with code 0")
        left = [process for process in alive(processes) if process.pid != server.process.pid]
        row.expect(not left, f"left behind: {left}")
        _, hanging = await asyncio.wait(listening, timeout=5.0)
        row.expect(not hanging, f"{len(hanging)} streams hang although the server has ended")
        for each in hanging:
            each.cancel()
    silent = [each for each in heard if each.ended not in ("told", "broken")]
    row.cut, row.wrong = len(heard) - len(silent), len(silent)
    row.expect(not silent, f"{len(silent)} streams ended as if nothing had happened")
    row.note = f"the server ended with code {server.process.poll()}"
    report.add(row)


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not (fulfilled := condition()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return fulfilled
