"""What is left of an attack: nothing held for requests that have ended, no process lost."""

from __future__ import annotations

import asyncio
import time

import httpx

from lexshard.loadtest.chaos.report import ChaosRow
from lexshard.loadtest.chaos.server import ServerUnderTest

REST_SECONDS = 10.0
GAUGES = (
    "lexshard_running",
    "lexshard_waiting",
    "lexshard_kv_blocks_used",
    "lexshard_admitted_sequences",
    "lexshard_admitted_waiting_tokens",
)


async def expect_idle(server: ServerUnderTest, row: ChaosRow) -> None:
    """Every gauge of what is held goes back to zero within seconds."""
    deadline = time.monotonic() + REST_SECONDS
    while (held := await _held(server)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    row.expect(not held, f"after {REST_SECONDS:.0f} s of rest there is still {held}")


async def expect_unharmed(server: ServerUnderTest, before: dict[int, str], row: ChaosRow) -> None:
    """It is idle, and still has the processes of ``before`` (see `ServerUnderTest.known`)."""
    await expect_idle(server, row)
    now = server.known()
    lost = sorted(role for pid, role in before.items() if pid not in now)
    row.expect(not lost, f"processes that have ended: {', '.join(lost)}")
    row.note = f"{server.errors_logged()} tracebacks in the log"


async def _held(server: ServerUnderTest) -> dict[str, float]:
    try:
        async with httpx.AsyncClient(timeout=5, verify=False, trust_env=False) as client:
            text = (await client.get(f"{server.url}/metrics")).text
    except httpx.HTTPError as error:
        return {repr(error): 1.0}
    samples = (line.rsplit(maxsplit=1) for line in text.splitlines() if line[:1] != "#")
    values = {name.partition("{")[0]: value for name, value in samples}
    return {name: held for name in GAUGES if (held := float(values.get(name, "nan")))}
