"""The client of a run: sends every request at its moment and writes down when what came.

A process of its own, so that nothing else of the benchmark delays it. It tells how many answers
have ended, and measures itself: how late it sent, and how late its own clock ticked.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from lexshard.loadtest.bench.load.plan import PlannedRequest
from lexshard.loadtest.bench.load.timeline import RequestTimeline
from lexshard.loadtest.client import Client, StreamedAnswer, fault_of

TICK_SECONDS = 0.02
SHOWN_SECONDS = 0.5
LEAD_SECONDS = 0.1  # from the start of the clock to the first request


@dataclass(frozen=True, slots=True)
class ClientTask:
    """What a client process is told. ``key_variable`` names the environment variable that holds
    the key of the endpoint, if it wants one."""

    url: str
    path: str
    requests: list[PlannedRequest]
    timeout: float
    key_variable: str | None = None


Outcome = tuple[list[RequestTimeline], list[float]]


class LoadClient:
    """Sends the requests of a task and listens to all of them."""

    def __init__(self, task: ClientTask, tell: Callable[[int], None]) -> None:
        self._task = task
        self._tell = tell
        key = os.environ[task.key_variable] if task.key_variable else None
        self._client = Client(task.url, key, seconds=task.timeout)
        self._started = 0.0
        self.ended = 0
        self.loop_delays: list[float] = []

    async def run(self) -> list[RequestTimeline]:
        bodies = [json.dumps(each.body).encode() for each in self._task.requests]
        requests = [self._client.request("POST", self._task.path, body) for body in bodies]
        gc.collect()
        gc.freeze()
        self._started = time.perf_counter() + LEAD_SECONDS
        ticking = asyncio.create_task(self._tick())
        asked = []
        for planned, request in zip(self._task.requests, requests, strict=True):
            # Even when it is late already: what is sent has to be let through.
            await asyncio.sleep(max(0.0, planned.seconds - self._now()))
            asked.append(asyncio.create_task(self._ask(planned.seconds, request)))
        timelines = await asyncio.gather(*asked)
        ticking.cancel()
        self._client.close()
        return timelines

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _ask(self, planned: float, request: bytes) -> RequestTimeline:
        stream = StreamedAnswer()
        sent = self._now()
        answer = await self._client.send([request], stream)
        failed = self._now()
        self.ended += 1
        fault = fault_of(answer, stream)
        heard = failed if fault or stream.heard is None else stream.heard - self._started
        return RequestTimeline(
            planned,
            sent,
            heard,
            tuple(piece - self._started for piece in stream.pieces),
            stream.prompt_tokens or 0,
            stream.output_tokens,
            fault,
        )

    async def _tick(self) -> None:
        shown = 0.0
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self.loop_delays.append(max(0.0, now - before - TICK_SECONDS))
            if now - shown >= SHOWN_SECONDS:
                shown = now
                self._tell(self.ended)


async def follow(task: ClientTask, tell: Callable[[int], None] = lambda _: None) -> Outcome:
    """The timelines of a task's requests and the delays of the client's own clock; ``tell`` hears
    now and then how many answers have ended."""
    client = LoadClient(task, tell)
    return await client.run(), client.loop_delays


def send(task: ClientTask, owner: Connection) -> None:
    """In a process of its own: tells its ``owner`` how many answers have ended, then all."""
    import uvloop

    owner.send(uvloop.run(follow(task, owner.send)))
