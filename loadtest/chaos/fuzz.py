"""Thousands of malformed and hostile requests on every route, with good ones and questions about
the server's health between them; and whether an answer is one that was promised."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

from lexshard.loadtest.bench.servers.running import RunningServer
from lexshard.loadtest.chaos.hostile import END, KINDS, LEAVES, HostileRequest, hostile_request
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.requests import (
    is_error,
    judge,
    listen,
    new_client,
    seeded_requests,
    undisturbed,
)
from lexshard.loadtest.chaos.watch import HEALTH_SECONDS, HealthWatch, expect_unharmed
from lexshard.loadtest.client import CLOSED, WHOLE, HttpAnswer
from lexshard.serve_app.openai.errors import TYPES_AND_CODES

PART = "fuzz"
GOOD_SECONDS = 5.0
GOOD_PAUSE = 0.3
CATCH_BREATH = 1.0


async def exchange(url: str, request: HostileRequest) -> HttpAnswer:
    """What came back to it, on a connection of its own."""
    client = new_client(url, request.patience)
    return await client.send(request.pieces, method=request.method, gap=request.gap)


async def run_fuzz(
    server: RunningServer, report: ChaosReport, *, quick: bool, only: str | None
) -> None:
    """Every kind in turn, a row each; or ``only`` one of them, ``KIND`` or ``KIND/NUMBER``."""
    before = server.roles()
    between = ChaosRow(PART, "good ones between", slowest=0.0)
    async with HealthWatch(server.url) as watch:
        asking = asyncio.ensure_future(_ask_on(server.url, report.seed, between))
        wanted, _, number = (only or "").partition("/")
        for name, kind in KINDS.items():
            numbers = [int(number)] if number else range(kind.quick if quick else kind.count)
            if wanted in ("", name) and numbers:
                report.add(await attack(server.url, name, numbers, report.seed, watch))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        between.expect(between.requests > 0, "not one good request was answered")
        report.add(between)
        row = ChaosRow(PART, "afterwards")
        await expect_unharmed(server, before, row)
        row.note += f"; /health {watch.latencies()}"
        report.add(row)


async def attack(
    url: str, name: str, numbers: Sequence[int], seed: int, watch: HealthWatch
) -> ChaosRow:
    """Those requests of a kind."""
    row = ChaosRow(PART, name, len(numbers), slowest=0.0)
    left = iter(numbers)
    alone = KINDS[name].at_once == 1

    async def worker() -> None:
        for number in left:
            # In a thread: to make a large one takes seconds.
            request = await asyncio.to_thread(hostile_request, name, seed, number)
            sent = time.monotonic()
            answer = await exchange(url, request)
            row.count(answer.status)
            row.slowest = max(row.slowest or 0.0, answer.seconds)
            place = f"number {number}: {request.begins()}"
            if reason := breach(request, answer):
                row.break_promise(f"{reason} | {place}")
            if alone and (seconds := watch.slowest_since(sent)) > HEALTH_SECONDS:
                told = f"/health took over {HEALTH_SECONDS:.0f} s"
                row.broken.append(f"{told} | {seconds:.1f} s, {place}")

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(KINDS[name].at_once)))
    await asyncio.sleep(CATCH_BREATH)  # what has been set off may show only now
    health = watch.slowest_since(began)
    row.note = f"slowest /health {health:.2f} s"
    row.expect(alone or health < HEALTH_SECONDS, f"/health took {health:.1f} s")
    sick = sorted({look.words for look in watch.since(began) if look.status != 200})
    row.expect(not sick, f"/health said {sick}")
    return row


async def _ask_on(url: str, seed: int, row: ChaosRow) -> None:
    """Good requests one after the other, whatever else the server is asked, until cancelled."""
    requests = seeded_requests(seed, 12, 12)
    client = new_client(url, 2 * GOOD_SECONDS)
    expected = await undisturbed(client, requests)
    while True:
        for request, known in zip(requests, expected, strict=True):
            heard = await listen(client, request)
            row.requests += 1
            judge(row, heard, known)
            row.slowest = max(row.slowest or 0.0, heard.seconds)
            if heard.seconds > GOOD_SECONDS:
                row.broken.append(f"a good request took over 5 s | {heard.seconds:.1f} s")
            await asyncio.sleep(GOOD_PAUSE)


# -- what is promised of an answer ----------------------------------------------------------------


def breach(request: HostileRequest, answer: HttpAnswer) -> str | None:
    """How an answer breaks what is promised: 2xx, 4xx, or 503 with ``Retry-After``, errors in
    OpenAI's shape, in time; but for what is no HTTP request. None where it does not."""
    status, kind = answer.status, answer.headers.get("content-type", "")
    if not status:
        if request.expects == LEAVES or (request.expects == END and answer.ended == CLOSED):
            return None
        if answer.ended == CLOSED:
            return "closed without an answer"
        return f"no answer within {request.patience:.0f} s"
    if answer.ended != WHOLE:
        return None if request.expects == LEAVES else f"status {status} that broke off"
    if status < 300:
        return _wrong_content(kind, answer.body)
    if status == 503:
        if "retry-after" not in answer.headers:
            return "503 without Retry-After"
    elif not 400 <= status < 500:
        return f"status {status}"
    elif status in (400, 408, 422) and kind.startswith("text/"):
        return None  # HAProxy and uvicorn have their own words for what is no HTTP request
    if request.method != "HEAD" and not is_error(answer.body, status):
        return f"status {status} without OpenAI's error shape"
    return None


def _wrong_content(kind: str, body: bytes) -> str | None:
    """What is wrong with a body of status 200."""
    try:
        if kind.startswith("application/json") and body:
            json.loads(body, parse_constant=_not_a_number)
        if not kind.startswith("text/event-stream"):
            return None
        events = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
        if not events or events[-1] != b"[DONE]":
            return "a stream that ended silently"
        for event in events[:-1]:
            error = json.loads(event, parse_constant=_not_a_number).get("error")
            if error is not None and error["type"] == TYPES_AND_CODES[500][0]:
                return f"a stream with {error['type']}: {error['message']}"
    except ValueError as error:
        return f"a body that is no JSON: {error}"
    return None


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
