"""Processes are killed and stopped under streams: who keeps their text, who is cut, who waits."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import psutil

from lexshard.loadtest.bench.servers.running import RunningServer, alive
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.requests import (
    Heard,
    SeededRequest,
    heard_out,
    judge_streams,
    listen,
    new_client,
    seeded_requests,
    undisturbed,
)
from lexshard.loadtest.chaos.watch import SERVING, HealthWatch, Look, expect_idle
from lexshard.loadtest.client import LATE, WHOLE, Client

STREAMS, TOKENS, QUICK_TOKENS = 40, 400, 250
LAST_STREAMS, LAST_TOKENS = 10, 1000
BEGIN_SECONDS, END_SECONDS, BACK_SECONDS = 30.0, 300.0, 60.0
STOPPED_SECONDS = 8.0
# Newcomers: one every so often, and how soon each is to be answered; `QUIET_SECONDS` without any
# trouble, a fault is taken to be none for them.
PAUSE_SECONDS, ANSWER_SECONDS, QUIET_SECONDS, LONGEST_SECONDS = 0.2, 5.0, 5.0, 150.0
SERVED_AGAIN = 5  # newcomers in a row
NEWCOMER = SeededRequest("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "seed": 1})


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the process of a role. ``cuts``: streams cannot survive it. ``no_ingress``:
    for a while there is nothing to answer. ``goes_on``: stopped for so long instead of killed."""

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
    Fault("Serve's controller"),
    Fault("API process", cuts=True),
    Fault("HAProxy's manager", cuts=True, no_ingress=True),
    Fault("HAProxy", cuts=True, no_ingress=True),
)
QUICK = ("engine SIGKILL", "sampler SIGKILL", "API process SIGKILL", "HAProxy SIGKILL")
LAST_FAULTS = {f"{role} SIGKILL": role for role in ("raylet", "Ray's GCS")}


async def run_kills(
    server: RunningServer, report: ChaosReport, *, quick: bool, only: str | None
) -> None:
    """Every fault in turn on one server, or ``only`` one; a row each."""
    requests = seeded_requests(report.seed + 2, STREAMS, QUICK_TOKENS if quick else TOKENS)
    client = new_client(server.url, END_SECONDS)
    expected = await undisturbed(client, requests, at_once=STREAMS)
    for fault in FAULTS:
        if not server.count(SERVING)[fault.role]:  # the server has been given other options
            continue
        if only == fault.name or (only is None and (not quick or fault.name in QUICK)):
            row = ChaosRow("kills", fault.name, requests=len(requests))
            try:
                await _strike(server, client, fault, requests, expected, row)
            except RuntimeError as error:  # what an earlier one has left
                row.broken.append(str(error))
            report.add(row)
    row = ChaosRow("kills", "afterwards")
    await expect_idle(server, row)
    report.add(row)


async def _strike(
    server: RunningServer,
    client: Client,
    fault: Fault,
    requests: Sequence[SeededRequest],
    expected: Sequence[Heard],
    row: ChaosRow,
) -> None:
    before = server.count(SERVING)
    newcomers = Newcomers(server.url)
    async with HealthWatch(server.url) as watch, newcomers:
        heard, listening = await _begun(client, requests)
        victim = server.find(fault.role)
        struck = time.monotonic()
        victim.send_signal(fault.number)
        if fault.goes_on is not None:
            await asyncio.sleep(fault.goes_on)
            victim.send_signal(signal.SIGCONT)
        mended = time.monotonic() if fault.goes_on is not None else struck
        await newcomers.until_served(watch, mended)
        await listening
        back = await until(lambda: server.count(SERVING) == before, BACK_SECONDS)
        await newcomers.finish()
    judge_newcomers(row, newcomers.heard, watch.looks, struck, mended, fault.no_ingress)
    judge_streams(row, heard, expected, may_cut=fault.cuts)
    alone = before[fault.role] == 1
    row.expect(alone or row.kept > 0, f"a {fault.role} took the streams of the others along")
    row.expect(back, f"processes are {dict(server.count(SERVING))}, were {dict(before)}")


async def run_last_kill(server: RunningServer, report: ChaosReport, name: str) -> None:
    """Without that role of Ray's the whole server is to end, with a code that says so."""
    row = ChaosRow("kills", name, requests=LAST_STREAMS)
    requests = seeded_requests(report.seed + 3, LAST_STREAMS, LAST_TOKENS)
    client = new_client(server.url, END_SECONDS)
    expected = await undisturbed(client, requests, at_once=LAST_STREAMS)
    heard, listening = await _begun(client, requests)
    processes = server.tree()
    struck = time.monotonic()
    server.find(LAST_FAULTS[name]).kill()
    ended = await until(lambda: server.process.poll() is not None, BEGIN_SECONDS)
    row.noticed = time.monotonic() - struck
    row.expect(ended, f"the server has not ended after {BEGIN_SECONDS:.0f} s")
    row.expect(server.process.poll() != 0, "the server ended with code 0")
    left = [process for process in alive(processes) if process.pid != server.process.pid]
    row.expect(not left, f"left behind: {left}")
    with suppress(TimeoutError):
        await asyncio.wait_for(listening, 5.0)
    row.expect(all(each.answered for each in heard), "streams hang")
    judge_streams(row, heard, expected, may_cut=True)
    row.note = f"the server ended with code {server.process.poll()}"
    report.add(row)


async def _begun(
    client: Client, requests: Sequence[SeededRequest]
) -> tuple[list[Heard], asyncio.Future[list[Heard]]]:
    """Streams, all of which have begun, and what waits for their end."""
    heard = [Heard() for _ in requests]
    pairs = zip(requests, heard, strict=True)
    listening = asyncio.gather(*(listen(client, request, each) for request, each in pairs))
    await until(lambda: all(each.has_begun for each in heard), BEGIN_SECONDS)
    return heard, listening


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not (fulfilled := condition()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return fulfilled


# -- new requests while something is broken -------------------------------------------------------


class Newcomers:
    """``async with``: a request every fifth of a second, whatever becomes of those before it."""

    def __init__(self, url: str) -> None:
        self._client = new_client(url, LONGEST_SECONDS)
        self.heard: list[Heard] = []
        self._open: list[asyncio.Task[Heard]] = []

    async def __aenter__(self) -> Newcomers:
        self._coming = asyncio.ensure_future(self._come())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()

    async def _come(self) -> None:
        while True:
            self.heard.append(Heard())
            self._open.append(asyncio.create_task(listen(self._client, NEWCOMER, self.heard[-1])))
            await asyncio.sleep(PAUSE_SECONDS)

    async def finish(self) -> None:
        """No more of them come; those that are here are heard out."""
        self._coming.cancel()
        await asyncio.gather(self._coming, *self._open, return_exceptions=True)

    async def until_served(self, watch: HealthWatch, mended: float) -> None:
        """Returns when the last few were served, or after very long."""
        while time.monotonic() < mended + LONGEST_SECONDS:
            ended = [each for each in self.heard if each.answered and each.sent > mended]
            calm = time.monotonic() - mended > QUIET_SECONDS
            healthy = bool(watch.looks) and watch.looks[-1].status == 200
            served = all(each.answer.status == 200 for each in ended[-SERVED_AGAIN:])
            if calm and healthy and served and len(ended) >= SERVED_AGAIN:
                return
            await asyncio.sleep(0.1)


def judge_newcomers(
    row: ChaosRow,
    newcomers: Sequence[Heard],
    looks: Sequence[Look],
    struck: float,
    mended: float,
    no_ingress: bool,
) -> None:
    """Fills in when it was noticed, when requests were served again and the slowest answer.

    Requests taken in before it was noticed wait like a stream; all later ones are answered, with
    200 or 503, within seconds.
    """
    here = [each for each in newcomers if each.answered >= struck]
    failed = [each for each in here if each.answer.status != 200]
    told = [each.answered for each in failed]
    told += [each.answered for each in looks if each.answered >= struck and each.status != 200]
    row.noticed = max(0.0, min(told) - struck) if told else None
    last = max((each.sent for each in failed), default=mended)
    served = [e.answered for e in here if e.answer.status == 200 and e.sent > last]
    row.recovered = max(0.0, min(served) - mended) if served else None
    late = [each for each in here if each.sent >= struck + (row.noticed or 0.0)]
    row.slowest = max((each.seconds for each in late), default=0.0)
    counts = Counter(str(each.answer.status or each.answer.ended) for each in here)
    row.note = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    row.broken += [trouble for each in late if (trouble := _trouble(each, no_ingress))]
    for each in here:
        if each.answer.status and not each.whole and not each.refused:
            reason = f"status {each.answer.status}, {each.answer.ended}"
            if each.answer.status == 503:
                reason = "503 without Retry-After or OpenAI's shape"
            row.broken.append(f"{reason} | {each.message}")
    row.expect(row.recovered is not None, "requests were never served again")
    texts = {text for e in newcomers if e.whole for text in e.stream.texts.values()}
    row.expect(len(texts) <= 1, f"new requests of one seed say different things: {texts}")


def _trouble(heard: Heard, no_ingress: bool) -> str | None:
    if heard.answer.ended == LATE or heard.seconds > ANSWER_SECONDS:
        return f"a new request waited for over {ANSWER_SECONDS:.0f} s | {heard.seconds:.1f} s"
    if heard.answer.ended != WHOLE and not no_ingress:
        return f"a new request was not answered | {heard.message}"
    return None


# -- faults at random moments ---------------------------------------------------------------------

# Three shards, of which the engine is one, and all that replaces them.
OPTIONS = ("--shards", "3", "--shard-spares", "1", "--shard-seconds", "2", "--samplers", "2")
RANDOM_STREAMS, QUICK_STREAMS, AT_ONCE, RANDOM_TOKENS = 200, 24, 16, 120
LONGEST_PEACE = 3.0  # between one fault and the next
MEDIAN_SECONDS = 5.0  # that shards and samplers may take to be replaced
RANDOM_FAULTS = tuple(
    (role, number) for role in ("shard", "sampler") for number in (signal.SIGKILL, signal.SIGSTOP)
)


async def run_faults(server: RunningServer, report: ChaosReport, *, quick: bool) -> None:
    """Shards and samplers are killed and stopped at random moments of many streams, one after the
    other: every stream keeps its text, and how long they paused is told."""
    count = QUICK_STREAMS if quick else RANDOM_STREAMS
    requests = seeded_requests(report.seed + 4, count, RANDOM_TOKENS)
    row = ChaosRow("faults", f"{count} streams", requests=count)
    before, chance = server.count(SERVING), random.Random(report.seed)
    client = new_client(server.url, END_SECONDS)
    expected = await undisturbed(client, requests, at_once=AT_ONCE)
    listening = asyncio.ensure_future(heard_out(client, requests, at_once=AT_ONCE))
    struck: list[tuple[float, str]] = []
    left: list[tuple[str, signal.Signals]] = []
    while not listening.done():
        await asyncio.sleep(chance.uniform(0.0, LONGEST_PEACE))
        if listening.done():
            break
        left = left or chance.sample(RANDOM_FAULTS, len(RANDOM_FAULTS))
        role, number = left.pop()
        victim = psutil.Process(chance.choice(await _in_service(server, role)))
        struck.append((time.perf_counter(), f"{role} {number.name}"))
        victim.send_signal(number)

        def replaced(lost: psutil.Process = victim) -> bool:
            return not alive([lost]) and server.count(SERVING) == before

        await until(lambda: replaced() or listening.done(), BACK_SECONDS)
        if listening.done():  # a stopped process is missed by a step: one at rest misses none
            await heard_out(client, requests[:1])
        row.expect(await until(replaced, BACK_SECONDS), f"no {role} came for {victim}")
    judge_streams(row, await listening, expected, may_cut=False)
    pauses = pauses_after(struck, [each.stream.pieces for each in listening.result()])
    every = [each for several in pauses.values() for each in several]
    row.recovered = median(every)
    row.expect(row.recovered < MEDIAN_SECONDS, f"the median pause was {row.recovered:.1f} s")
    row.note = "; ".join(
        f"{name} {len(each)} times, median {median(each):.1f} s, at most {max(each):.1f}"
        for name, each in sorted(pauses.items())
    )
    await expect_idle(server, row)
    report.add(row)


def pauses_after(
    struck: Sequence[tuple[float, str]], streams: Sequence[Sequence[float]]
) -> dict[str, list[float]]:
    """By fault, the longest silence of all streams together between it and the next one."""
    moments = sorted(moment for pieces in streams for moment in pieces)
    found: dict[str, list[float]] = {}
    for (begin, name), (end, _) in zip(struck, [*struck[1:], (float("inf"), "")], strict=True):
        heard = [begin, *(each for each in moments if begin < each < end)]
        found.setdefault(name, []).append(max((b - a for a, b in pairwise(heard)), default=0.0))
    return found


async def _in_service(server: RunningServer, role: str) -> list[int]:
    """The processes of a role that steps wait for: no spares, and not the engine's own shard."""
    answer = await new_client(server.url, END_SECONDS).get("/status")
    roles = answer.json()["roles"]
    body = {each["process_id"] for each in roles if each["role"] == "body"}
    return sorted({each["process_id"] for each in roles if each["role"] == role} - body)
