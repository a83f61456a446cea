"""Thousands of malformed and hostile requests on every route, with good ones and questions about
the server's health between them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lexshard.loadtest.chaos.afterwards import expect_unharmed
from lexshard.loadtest.chaos.client import (
    KEPT,
    REFUSED,
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
from lexshard.loadtest.chaos.health import HealthWatch, latencies
from lexshard.loadtest.chaos.hostile import bodies, large, wire
from lexshard.loadtest.chaos.hostile.exchange import HostileRequest, WireAnswer, breach, exchange
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow, counted
from lexshard.loadtest.chaos.server import ServerUnderTest

PART = "fuzz"
HEALTH_SECONDS = 1.0
GOOD_SECONDS = 5.0
GOOD_PAUSE = 0.3
CATCH_BREATH = 1.0
KEPT_BYTES = 2000  # of a request that broke a promise, in the JSON file


@dataclass(frozen=True, slots=True)
class FuzzKind:
    """A class of requests: how one is made, how many there are in full and with ``--quick``, and
    how many are sent at once."""

    make: Callable[[random.Random], HostileRequest]
    count: int
    quick: int
    at_once: int = 8


KINDS = {
    "wrong types": FuzzKind(bodies.wrong_types, 900, 80),
    "odd numbers": FuzzKind(bodies.odd_numbers, 500, 50),
    "nesting": FuzzKind(bodies.nesting, 300, 25),
    "broken JSON": FuzzKind(bodies.broken_json, 500, 50),
    "broken UTF-8": FuzzKind(bodies.broken_utf8, 400, 40),
    "unknown fields": FuzzKind(bodies.unknown_fields, 300, 25),
    "empty": FuzzKind(bodies.empty, 150, 40),
    "control characters": FuzzKind(bodies.control_characters, 300, 40),
    "odd sampling": FuzzKind(large.odd_sampling, 400, 40),
    "odd conversations": FuzzKind(large.odd_conversations, 300, 25),
    "methods and paths": FuzzKind(wire.methods_and_paths, 300, 60),
    "odd headers": FuzzKind(wire.odd_headers, 250, 50),
    "broken HTTP": FuzzKind(wire.broken_http, 300, 40),
    "half-sent": FuzzKind(wire.halves, 100, 30, at_once=50),
    "bodies that stop": FuzzKind(wire.stopping_bodies, 20, 0, at_once=20),
    "clients that leave": FuzzKind(wire.leaving, 150, 30),
    "many keys": FuzzKind(large.many_keys, 30, 8, at_once=1),
    "giant prompts": FuzzKind(large.giant_prompts, 40, 8, at_once=1),
    "large bodies": FuzzKind(wire.large_bodies, 15, 5, at_once=1),
}


def hostile_request(kind: str, seed: int, number: int) -> HostileRequest:
    """The same for the same arguments."""
    return KINDS[kind].make(random.Random(f"{kind} {number} of {seed}"))


async def run_fuzz(
    server: ServerUnderTest, report: ChaosReport, *, quick: bool, only: str | None
) -> None:
    """Every kind in turn, a row each; or ``only`` one of them, ``KIND`` or ``KIND/NUMBER``."""
    requests = seeded_requests(report.seed, 12, 12)
    before = server.known()
    async with new_client(server.url, GOOD_SECONDS) as client, HealthWatch(server.port) as watch:
        expected = await undisturbed(client, requests)
        between = GoodRequests(server.url, requests, expected)
        asking = asyncio.ensure_future(between.ask_on())
        wanted, _, number = (only or "").partition("/")
        for name, kind in KINDS.items():
            numbers = [int(number)] if number else range(kind.quick if quick else kind.count)
            if wanted in ("", name) and numbers:
                report.add(await attack(server, name, numbers, report.seed, watch))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        report.add(between.row())
        row = ChaosRow(PART, "afterwards")
        await expect_unharmed(server, before, row)
        row.note += f"; /health {latencies(watch.looks)}"
        report.add(row)


async def attack(
    server: ServerUnderTest, name: str, numbers: Sequence[int], seed: int, watch: HealthWatch
) -> ChaosRow:
    """Those requests of a kind."""
    row = ChaosRow(PART, name, requests=len(numbers))
    reasons: list[str] = []
    examples: list[dict[str, Any]] = []
    left = iter(numbers)
    slowest = 0.0
    alone = KINDS[name].at_once == 1

    async def worker() -> None:
        nonlocal slowest
        for number in left:
            # In a thread: to make a large one takes seconds.
            request = await asyncio.to_thread(hostile_request, name, seed, number)
            sent = time.monotonic()
            answer = await exchange(server.port, request)
            reason = breach(request, answer)
            _count(row, answer)
            slowest = max(slowest, answer.seconds)
            if reason is not None:
                row.wrong += 1
                reasons.append(f"{reason} | number {number}: {request.begins()}")
                examples.append(_example(number, reason, request, answer))
            if alone and (seconds := watch.slowest_since(sent)) > HEALTH_SECONDS:
                told = f"{seconds:.1f} s, number {number}: {request.begins()}"
                reasons.append(f"/health took over {HEALTH_SECONDS:.0f} s | {told}")

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(KINDS[name].at_once)))
    await asyncio.sleep(CATCH_BREATH)  # what has been set off may show only now
    health = watch.slowest_since(began)
    row.slowest = slowest
    row.note = f"slowest /health {health:.2f} s"
    row.broken = counted(reasons)
    row.expect(alone or health < HEALTH_SECONDS, f"/health took {health:.1f} s")
    sick = sorted({look.words for look in watch.since(began) if look.status != 200})
    row.expect(not sick, f"/health said {sick}")
    row.details = {"breaches": examples}
    return row


def _count(row: ChaosRow, answer: WireAnswer) -> None:
    if not answer.status:
        row.cut += 1
    elif answer.status < 300:
        row.kept += 1
    elif answer.status < 500 or answer.status == 503:
        row.refused += 1


def _example(
    number: int, reason: str, request: HostileRequest, answer: WireAnswer
) -> dict[str, Any]:
    sent = b"".join(request.pieces)
    return {
        "number": number,
        "reason": reason,
        "status": answer.status,
        "seconds": answer.seconds,
        "sent": sent[:KEPT_BYTES].decode("latin-1"),
        "sent_bytes": len(sent),
        "answer": answer.body[:KEPT_BYTES].decode("latin-1"),
    }


class GoodRequests:
    """Good requests one after the other, whatever else the server is asked."""

    def __init__(
        self, url: str, requests: Sequence[SeededRequest], expected: Sequence[Heard]
    ) -> None:
        self._client = new_client(url, 2 * GOOD_SECONDS)
        self._pairs = list(zip(requests, expected, strict=True))
        self._row = ChaosRow(PART, "good ones between")
        self._reasons: list[str] = []
        self._slowest = 0.0

    async def ask_on(self) -> None:
        """Until it is cancelled."""
        async with self._client:
            while True:
                for request, expected in self._pairs:
                    self._judge(await listen(self._client, request, Heard()), expected)
                    await asyncio.sleep(GOOD_PAUSE)

    def _judge(self, heard: Heard, expected: Heard) -> None:
        row, result = self._row, fate(heard, expected)
        row.requests += 1
        row.kept += result == KEPT
        row.refused += result == REFUSED
        self._slowest = max(self._slowest, heard.seconds)
        if result == WRONG:
            row.wrong += 1
            self._reasons.append(difference(heard, expected))
        elif result not in (KEPT, REFUSED):
            row.cut += 1
            self._reasons.append(f"a good request was cut | {heard.message}")
        if heard.seconds > GOOD_SECONDS:
            self._reasons.append(f"a good request took over 5 s | {heard.seconds:.1f} s")

    def row(self) -> ChaosRow:
        self._row.slowest = self._slowest
        self._row.broken = counted(self._reasons)
        return self._row
