"""Hundreds of seeded streams at once: each says what it says alone."""

from __future__ import annotations

import asyncio
import random

import httpx

from lexshard.loadtest.chaos.afterwards import expect_idle
from lexshard.loadtest.chaos.client import (
    CUT,
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
from lexshard.loadtest.chaos.health import HealthWatch, latencies
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow, counted
from lexshard.loadtest.chaos.server import ServerUnderTest

PART = "streams"
STREAMS = 300
TOKENS, QUICK_TOKENS = 24, 8
SILENCE_SECONDS = 60.0
TRIES = 200


async def run_streams(server: ServerUnderTest, report: ChaosReport, *, quick: bool) -> None:
    """One after the other first, then all at once."""
    requests = seeded_requests(report.seed + 1, STREAMS, QUICK_TOKENS if quick else TOKENS)
    row = ChaosRow(PART, f"{STREAMS} at once", requests=STREAMS)
    chance = random.Random(report.seed)
    async with new_client(server.url, SILENCE_SECONDS) as client, HealthWatch(server.port) as watch:
        expected = await undisturbed(client, requests)
        watch.looks.clear()
        answers = await asyncio.gather(
            *(_until_taken(client, request, row, chance) for request in requests)
        )
        row.note = f"/health {latencies(watch.looks)}"
    reasons = []
    for heard, alone in zip(answers, expected, strict=True):
        result = fate(heard, alone)
        row.kept += result == KEPT
        row.cut += result == CUT
        if result != KEPT:
            row.wrong += result != CUT
            reasons.append(f"{result}: {difference(heard, alone)}")
    row.slowest = max(heard.seconds for heard in answers)
    row.broken = counted(reasons)
    await expect_idle(server, row)
    report.add(row)


async def _until_taken(
    client: httpx.AsyncClient, request: SeededRequest, row: ChaosRow, chance: random.Random
) -> Heard:
    """As the ``openai`` client does: a 503 is tried again when the server says."""
    for _ in range(TRIES):
        heard = await listen(client, request, Heard())
        if fate(heard, heard) != REFUSED:
            break
        row.refused += 1
        await asyncio.sleep(float(heard.retry_after or 1) * (0.5 + chance.random()))
    return heard
