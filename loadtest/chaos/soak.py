"""Minutes of mixed load: good requests whose text is known, bad ones, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx

from lexshard.loadtest.bench.record import percentile
from lexshard.loadtest.chaos.afterwards import expect_unharmed
from lexshard.loadtest.chaos.client import (
    KEPT,
    REFUSED,
    Heard,
    SeededRequest,
    difference,
    fate,
    listen,
    new_client,
    seeded_requests,
    undisturbed,
)
from lexshard.loadtest.chaos.fuzz import HEALTH_SECONDS, hostile_request
from lexshard.loadtest.chaos.growth import GrowthWatch
from lexshard.loadtest.chaos.health import HealthWatch, latencies
from lexshard.loadtest.chaos.hostile.exchange import breach, exchange
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow, counted
from lexshard.loadtest.chaos.server import ServerUnderTest

PART = "soak"
SECONDS, QUICK_SECONDS = 240.0, 25.0
CLIENTS = 8
GROWTH_LOOKS = 60
ANSWER_SECONDS = 30.0
BAD_KINDS = ("wrong types", "odd numbers", "broken JSON", "empty", "odd conversations", "nesting")
GOOD, BAD, LEAVING, TOKENIZED, METRICS = "good", "bad", "leaving", "/tokenize", "/metrics"
WEIGHTS = {GOOD: 50, BAD: 20, LEAVING: 15, TOKENIZED: 10, METRICS: 5}


async def run_soak(server: ServerUnderTest, report: ChaosReport, *, quick: bool) -> None:
    """A row per kind of request, one for ``/health``, one per process."""
    before = server.known()
    growth = GrowthWatch(server)
    seconds = QUICK_SECONDS if quick else SECONDS
    async with new_client(server.url, ANSWER_SECONDS) as client:
        load = MixedLoad(server, client, report.seed)
        await load.prepare()
        async with HealthWatch(server.port) as watch:
            looking = asyncio.ensure_future(growth.look_on(seconds / GROWTH_LOOKS))
            deadline = time.monotonic() + seconds
            await asyncio.gather(*(load.ask_until(deadline, index) for index in range(CLIENTS)))
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
    for row in load.rows():
        report.add(row)
    report.add(_health_row(watch))
    for row in growth.rows(PART):
        report.add(row)
    row = ChaosRow(PART, "afterwards")
    await expect_unharmed(server, before, row)
    report.add(row)


def _health_row(watch: HealthWatch) -> ChaosRow:
    row = ChaosRow(PART, "/health", requests=len(watch.looks), note=latencies(watch.looks))
    row.kept = sum(look.status == 200 for look in watch.looks)
    row.slowest = max(look.seconds for look in watch.looks)
    row.expect(row.kept == row.requests, f"{row.requests - row.kept} times it was not 200")
    row.expect(row.slowest < HEALTH_SECONDS, f"it took {row.slowest:.1f} s")
    return row


class MixedLoad:
    """Clients that ask one thing after the other, drawn from a seed, and judge every answer."""

    def __init__(self, server: ServerUnderTest, client: httpx.AsyncClient, seed: int) -> None:
        self._server = server
        self._client = client
        self._seed = seed
        self._pairs: list[tuple[SeededRequest, Heard]] = []
        self._long: list[tuple[SeededRequest, Heard]] = []
        self._ids: bytes = b""
        self._rows = {kind: ChaosRow(PART, kind) for kind in WEIGHTS}
        self._reasons: dict[str, list[str]] = defaultdict(list)
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._ask: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            GOOD: self._good,
            BAD: self._bad,
            LEAVING: self._leaving,
            TOKENIZED: self._tokenized,
            METRICS: self._metrics,
        }

    async def prepare(self) -> None:
        """Learns what good requests are answered."""
        requests = seeded_requests(self._seed + 4, 16, 40)
        requests += seeded_requests(self._seed + 5, 8, 40, stream=False)
        requests.append(SeededRequest(requests[-3].path, {**requests[-3].body, "n": 2}))
        self._pairs = list(zip(requests, await undisturbed(self._client, requests), strict=True))
        long = seeded_requests(self._seed + 6, 4, 300)
        self._long = list(zip(long, await undisturbed(self._client, long), strict=True))
        self._ids = (await self._tokenize()).content

    async def ask_until(self, deadline: float, number: int) -> None:
        """One client's life."""
        chance = random.Random(f"client {number} of {self._seed}")
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while time.monotonic() < deadline:
            [kind] = chance.choices(kinds, weights)
            asked = time.monotonic()
            self._rows[kind].requests += 1
            try:
                await self._ask[kind](chance)
            except httpx.HTTPError as error:
                self._wrong(kind, f"no answer | {error!r}")
            self._seconds[kind].append(time.monotonic() - asked)

    def rows(self) -> list[ChaosRow]:
        for kind, row in self._rows.items():
            row.broken = counted(self._reasons[kind])
            if seconds := self._seconds[kind]:
                row.slowest = max(seconds)
                middle, high = percentile(seconds, 50), percentile(seconds, 99)
                row.note = f"p50 {1e3 * middle:.0f} ms, p99 {1e3 * high:.0f} ms"
        return list(self._rows.values())

    def _wrong(self, kind: str, reason: str) -> None:
        self._rows[kind].wrong += 1
        self._reasons[kind].append(reason)

    async def _good(self, chance: random.Random) -> None:
        request, expected = chance.choice(self._pairs)
        heard = await listen(self._client, request, Heard())
        result = fate(heard, expected)
        self._rows[GOOD].kept += result == KEPT
        self._rows[GOOD].refused += result == REFUSED
        if result not in (KEPT, REFUSED):
            self._wrong(GOOD, difference(heard, expected))

    async def _leaving(self, chance: random.Random) -> None:
        request, expected = chance.choice(self._long)
        heard = Heard()
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.random()):
                await listen(self._client, request, heard)
        self._rows[LEAVING].cut += not heard.ended
        for index, text in heard.texts.items():
            if not expected.texts[index].startswith(text):
                self._wrong(LEAVING, f"wrong tokens | {text}")

    async def _bad(self, chance: random.Random) -> None:
        request = hostile_request(chance.choice(BAD_KINDS), self._seed, chance.randrange(2**31))
        answer = await exchange(self._server.port, request)
        self._rows[BAD].kept += 200 <= answer.status < 300
        self._rows[BAD].refused += 400 <= answer.status < 500 or answer.status == 503
        if reason := breach(request, answer):
            self._wrong(BAD, f"{reason} | {request.begins()}")

    async def _tokenized(self, _: random.Random) -> None:
        response = await self._tokenize()
        self._rows[TOKENIZED].kept += response.content == self._ids
        if response.content != self._ids:
            self._wrong(TOKENIZED, f"status {response.status_code} | {response.text[:200]}")

    async def _metrics(self, _: random.Random) -> None:
        response = await self._client.get("/metrics")
        self._rows[METRICS].kept += response.status_code == 200
        if response.status_code != 200:
            self._wrong(METRICS, f"status {response.status_code} | {response.text[:200]}")

    async def _tokenize(self) -> httpx.Response:
        content = json.dumps({"prompt": "Once upon a time there was a child. " * 20})
        return await self._client.post("/tokenize", content=content)
