"""Shards and samplers are killed and stopped at random moments of many streams, one after the
other: every stream keeps its text, and how long they paused is told."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import psutil

from lexshard.loadtest.chaos.afterwards import expect_idle
from lexshard.loadtest.chaos.client import (
    Heard,
    SeededRequest,
    listen,
    new_client,
    seeded_requests,
    undisturbed,
)
from lexshard.loadtest.chaos.kills import judge_streams
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.server import ServerUnderTest, alive

PART = "faults"
STREAMS, QUICK_STREAMS = 200, 24
AT_ONCE = 16
TOKENS = 120
SILENCE_SECONDS = 150.0  # the longest that a stream may pause
BACK_SECONDS = 60.0  # until every process is there again
LONGEST_PEACE = 3.0  # between one fault and the next
LOOK_SECONDS = 0.02
SETTLED_SECONDS = 1.0  # of text that comes again
MEDIAN_SECONDS = 5.0  # that shards and samplers may take to be replaced
FAULTS = tuple(
    (role, number) for role in ("shard", "sampler") for number in (signal.SIGKILL, signal.SIGSTOP)
)
# Three shards, of which the engine is one, and all that replaces them.
OPTIONS = ("--shards", "3", "--shard-spares", "1", "--shard-seconds", "2", "--samplers", "2")


@dataclass(slots=True)
class Strikes:
    """What was done and, by fault, the seconds until streams went on."""

    recovered: dict[str, list[float]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def note(self) -> str:
        return "; ".join(
            f"{name} {len(seconds)} times, median {median(seconds):.1f} s, at most "
            f"{max(seconds):.1f}"
            for name, seconds in sorted(self.recovered.items())
        )


async def run_faults(server: ServerUnderTest, report: ChaosReport, *, quick: bool) -> None:
    """All streams undisturbed first, then again under faults."""
    count = QUICK_STREAMS if quick else STREAMS
    requests = seeded_requests(report.seed + 4, count, TOKENS)
    row = ChaosRow(PART, f"{count} streams", requests=count)
    before = server.serving()
    async with new_client(server.url, SILENCE_SECONDS) as client:
        expected = await undisturbed(client, requests, at_once=AT_ONCE)
        heard = [Heard() for _ in requests]
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(request: SeededRequest, own: Heard) -> None:
            async with turns:
                await listen(client, request, own)

        listening = asyncio.gather(*map(one, requests, heard))
        strikes = await _strike(server, heard, random.Random(report.seed), listening.done)
        await listening
    judge_streams(row, heard, expected, may_cut=False)
    row.broken.extend(strikes.broken)
    seconds = [each for several in strikes.recovered.values() for each in several]
    row.expect(bool(seconds), "the streams ended before anything was done to them")
    if seconds:
        row.recovered = median(seconds)
        row.expect(
            row.recovered < MEDIAN_SECONDS,
            f"the median pause was {row.recovered:.1f} s",
        )
    row.note = strikes.note()
    row.details["recovered"] = strikes.recovered
    await _until(lambda: server.serving() == before, BACK_SECONDS)
    row.expect(
        server.serving() == before,
        f"processes are {dict(server.serving())}, were {dict(before)}",
    )
    row.expect(not _stopped(server), "a stopped process was left behind")
    await expect_idle(server, row)
    report.add(row)


async def _strike(
    server: ServerUnderTest,
    heard: Sequence[Heard],
    chance: random.Random,
    over: Callable[[], bool],
) -> Strikes:
    """Faults of every kind in random order and at random moments until the streams are ``over``."""
    strikes, left, before = Strikes(), list[tuple[str, signal.Signals]](), server.serving()
    while True:
        await asyncio.sleep(chance.uniform(0.0, LONGEST_PEACE))
        if over():
            return strikes
        if not left:
            left = chance.sample(FAULTS, len(FAULTS))
        role, number = left.pop()
        victims = await _in_service(server, role)
        if not victims:
            strikes.broken.append(f"no {role} was left")
            return strikes
        victim = psutil.Process(chance.choice(victims))
        struck = time.monotonic()
        victim.send_signal(number)
        pause = await _pause(heard, struck, over)
        strikes.recovered.setdefault(f"{role} {number.name}", []).append(pause)
        whole = await _until(partial(_replaced, server, victim, before), BACK_SECONDS)
        if not whole and not over():
            strikes.broken.append(f"no {role} came for one that had {number.name}")
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)


def _replaced(server: ServerUnderTest, lost: psutil.Process, before: Counter[str]) -> bool:
    return not alive([lost]) and server.serving() == before


async def _pause(heard: Sequence[Heard], struck: float, over: Callable[[], bool]) -> float:
    """How long after a fault the last longer pause of all streams together ended."""
    said, since, ended = _said(heard), struck, struck
    while not over() and time.monotonic() - struck < SILENCE_SECONDS:
        await asyncio.sleep(LOOK_SECONDS)
        now, words = time.monotonic(), _said(heard)
        if words != said:
            if now - since > SETTLED_SECONDS / 4:
                ended = now
            said, since = words, now
            # Whoever was stopped is noticed after seconds in which others may speak.
            if now - max(ended, struck) > SETTLED_SECONDS:
                break
    return ended - struck


def _said(heard: Sequence[Heard]) -> int:
    return sum(len(text) for each in heard for text in each.texts.values())


async def _in_service(server: ServerUnderTest, role: str) -> list[int]:
    """The processes of a role that steps wait for: no spares, and not the engine's own shard."""
    async with new_client(server.url, SILENCE_SECONDS) as client:
        roles = (await client.get("/status")).json()["roles"]
    body = {each["process_id"] for each in roles if each["role"] == "body"}
    found = {each["process_id"] for each in roles if each["role"] == role}
    return sorted(found - body)


def _stopped(server: ServerUnderTest) -> list[int]:
    """Processes of the server that SIGSTOP holds."""
    found = []
    for process in server.tree():
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process.pid)
    return found


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not (fulfilled := condition()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return fulfilled
