"""Hundreds of seeded streams at once, each of which says what it says alone; and minutes of mixed
load: good requests whose text is known, bad ones, clients that leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from contextlib import suppress

from lexshard.loadtest.bench.record import percentile
from lexshard.loadtest.bench.servers.running import RunningServer
from lexshard.loadtest.chaos.fuzz import breach, exchange
from lexshard.loadtest.chaos.hostile import hostile_request
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.requests import (
    Heard,
    SeededRequest,
    judge,
    judge_streams,
    listen,
    new_client,
    seeded_requests,
    undisturbed,
)
from lexshard.loadtest.chaos.watch import (
    HEALTH_SECONDS,
    GrowthWatch,
    HealthWatch,
    expect_idle,
    expect_unharmed,
)
from lexshard.loadtest.client import Client, HttpAnswer

SECONDS, QUICK_SECONDS = 240.0, 25.0
CLIENTS = 8
GROWTH_LOOKS = 60
ANSWER_SECONDS = 60.0
STREAMS, TOKENS, QUICK_TOKENS, TRIES = 300, 24, 8, 200
BAD_KINDS = ("wrong types", "odd numbers", "broken JSON", "empty", "odd conversations", "nesting")
GOOD, BAD, LEAVING, TOKENIZED, METRICS = "good", "bad", "leaving", "/tokenize", "/metrics"
WEIGHTS = {GOOD: 50, BAD: 20, LEAVING: 15, TOKENIZED: 10, METRICS: 5}


async def run_streams(server: RunningServer, report: ChaosReport, *, quick: bool) -> None:
    """One after the other first, then all at once."""
    requests = seeded_requests(report.seed + 1, STREAMS, QUICK_TOKENS if quick else TOKENS)
    row = ChaosRow("streams", f"{STREAMS} at once", requests=STREAMS)
    chance, client = random.Random(report.seed), new_client(server.url, 4 * ANSWER_SECONDS)
    refused = 0

    async def until_taken(request: SeededRequest) -> Heard:
        """As the ``openai`` client does: a 503 is tried again when the server says."""
        nonlocal refused
        for _ in range(TRIES):
            heard = await listen(client, request)
            if not heard.refused:
                break
            refused += 1
            pause = float(heard.answer.headers.get("retry-after", 1))
            await asyncio.sleep(pause * (0.5 + chance.random()))
        return heard

    expected = await undisturbed(client, requests)
    async with HealthWatch(server.url) as watch:
        answers = await asyncio.gather(*map(until_taken, requests))
        row.note = f"/health {watch.latencies()}"
    judge_streams(row, answers, expected, may_cut=False)
    row.refused = refused
    row.slowest = max(heard.seconds for heard in answers)
    await expect_idle(server, row)
    report.add(row)


async def run_soak(server: RunningServer, report: ChaosReport, *, quick: bool) -> None:
    """A row per kind of request, one for ``/health``, one per process."""
    before, growth = server.roles(), GrowthWatch(server)
    seconds = QUICK_SECONDS if quick else SECONDS
    load = MixedLoad(server.url, new_client(server.url, ANSWER_SECONDS), report.seed)
    await load.prepare()
    async with HealthWatch(server.url) as watch:
        looking = asyncio.ensure_future(growth.look_on(seconds / GROWTH_LOOKS))
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(load.ask_until(deadline, index) for index in range(CLIENTS)))
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    health = ChaosRow("soak", "/health", requests=len(watch.looks), note=watch.latencies())
    health.kept = sum(look.status == 200 for look in watch.looks)
    health.slowest = watch.slowest_since(0.0)
    health.expect(health.kept == health.requests, "sometimes it was not 200")
    health.expect(health.slowest < HEALTH_SECONDS, f"it took {health.slowest:.1f} s")
    afterwards = ChaosRow("soak", "afterwards")
    await expect_unharmed(server, before, afterwards)
    for row in (*load.rows(), health, *growth.rows("soak"), afterwards):
        report.add(row)


class MixedLoad:
    """Clients that ask one thing after the other, drawn from a seed, and judge every answer."""

    def __init__(self, url: str, client: Client, seed: int) -> None:
        self._url = url
        self._client = client
        self._seed = seed
        self._pairs: list[tuple[SeededRequest, Heard]] = []
        self._long: list[tuple[SeededRequest, Heard]] = []
        self._ids = b""
        self._rows = {kind: ChaosRow("soak", kind) for kind in WEIGHTS}
        self._seconds: dict[str, list[float]] = defaultdict(list)

    async def prepare(self) -> None:
        """Learns what good requests are answered."""
        requests = seeded_requests(self._seed + 4, 16, 40)
        requests += seeded_requests(self._seed + 5, 8, 40, stream=False)
        requests.append(SeededRequest(requests[-3].path, {**requests[-3].body, "n": 2}))
        self._pairs = list(zip(requests, await undisturbed(self._client, requests), strict=True))
        long = seeded_requests(self._seed + 6, 4, 300)
        self._long = list(zip(long, await undisturbed(self._client, long), strict=True))
        self._ids = (await self._tokenize()).body

    async def ask_until(self, deadline: float, number: int) -> None:
        """One client's life."""
        chance = random.Random(f"client {number} of {self._seed}")
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while time.monotonic() < deadline:
            [kind] = chance.choices(kinds, weights)
            asked = time.monotonic()
            self._rows[kind].requests += 1
            await self._ask(kind, self._rows[kind], chance)
            self._seconds[kind].append(time.monotonic() - asked)

    def rows(self) -> list[ChaosRow]:
        for kind, seconds in self._seconds.items():
            middle, high = percentile(seconds, 50), percentile(seconds, 99)
            self._rows[kind].slowest = max(seconds)
            self._rows[kind].note = f"p50 {1e3 * middle:.0f} ms, p99 {1e3 * high:.0f} ms"
        return list(self._rows.values())

    async def _ask(self, kind: str, row: ChaosRow, chance: random.Random) -> None:
        if kind == GOOD:
            request, expected = chance.choice(self._pairs)
            judge(row, await listen(self._client, request), expected)
        elif kind == LEAVING:
            request, expected = chance.choice(self._long)
            heard = Heard()
            with suppress(TimeoutError):
                async with asyncio.timeout(chance.random()):
                    await listen(self._client, request, heard)
            row.cut += not heard.answered
            for index, text in heard.stream.texts.items():
                if not expected.stream.texts[index].startswith(text):
                    row.break_promise(f"wrong tokens | {text}")
        elif kind == BAD:
            kind = chance.choice(BAD_KINDS)
            hostile = hostile_request(kind, self._seed, chance.randrange(2**31))
            answer = await exchange(self._url, hostile)
            row.count(answer.status)
            if reason := breach(hostile, answer):
                row.break_promise(f"{reason} | {hostile.begins()}")
        else:
            ids = kind == TOKENIZED
            answer = await (self._tokenize() if ids else self._client.get(METRICS))
            right = answer.status == 200 and (not ids or answer.body == self._ids)
            row.kept += right
            if not right:
                told = answer.fault or repr(answer.body[:200])
                row.break_promise(f"status {answer.status} | {told}")

    async def _tokenize(self) -> HttpAnswer:
        body = {"prompt": "Once upon a time there was a child. " * 20}
        return await self._client.post(TOKENIZED, body)
