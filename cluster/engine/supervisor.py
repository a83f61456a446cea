"""The API process's handle on the engine: submit, stream, cancel, and survive its death.

Every unfinished sequence stands in a journal with the tokens its client has already received.
When the engine dies, a new one is started and the journal is replayed: the same seed gives the
same continuation, so open streams go on where they stopped. A request that was running through
two deaths is taken to be their cause and ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from actors.configuration import EngineConfiguration, EngineInformation
from actors.engine.loop import Commands
from actors.messages import EngineStatistics, Request, SequenceEvent, StepOutput
from cluster.engine.process import start_engine_actor
from cluster.engine.transport import ClientSide, private_endpoints

logger = logging.getLogger("lexshard.engine")

DEATHS_PER_REQUEST = 2
STALL_SECONDS = 60.0
RESTART_PAUSE_SECONDS = 5.0


class JournalStream:
    """The events of the sequences one HTTP request submitted, as they come."""

    def __init__(self, supervisor: EngineSupervisor, request_ids: Iterable[str]) -> None:
        self._supervisor = supervisor
        self._request_ids = tuple(request_ids)
        self._queue: asyncio.Queue[SequenceEvent] = asyncio.Queue()

    def put(self, event: SequenceEvent) -> None:
        self._queue.put_nowait(event)

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        return await self._queue.get()

    def drain(self) -> list[SequenceEvent]:
        """Whatever else has already arrived, without waiting."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def close(self) -> None:
        """Cancel what has not finished. Closing twice is harmless."""
        for request_id in self._request_ids:
            self._supervisor.cancel(request_id)


@dataclass(slots=True)
class _Entry:
    """One unfinished sequence of the journal."""

    request: Request
    stream: JournalStream
    received: list[int] = field(default_factory=list)
    deaths: int = 0


class EngineSupervisor:
    """Starts an engine, keeps one alive, and routes its events. Lives in one event loop."""

    def __init__(
        self,
        configuration: EngineConfiguration,
        start_actor: Callable[[EngineConfiguration], Any] = start_engine_actor,
    ) -> None:
        self._configuration = configuration
        self._start_actor = start_actor
        self._journal: dict[str, dict[int, _Entry]] = {}
        self._side: ClientSide | None = None
        self._actor: Any = None
        self._supervision: asyncio.Task[None] | None = None
        self._last_output = 0.0
        self._information: EngineInformation | None = None
        self.statistics = EngineStatistics()
        self.restarts = 0
        self.failure: str | None = None
        self.health_reason: str | None = (
            "the engine is starting (a first start compiles its kernels: about a minute)"
        )

    @property
    def ready(self) -> bool:
        return self.health_reason is None

    @property
    def information(self) -> EngineInformation:
        """What the engine decided. Raises RuntimeError before it was ready for the first time."""
        if self._information is None:
            raise RuntimeError(f"no engine yet: {self.health_reason}")
        return self._information

    def start(self) -> None:
        """Begin supervising; call once, inside the event loop."""
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self) -> None:
        """End the engine and every open stream."""
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._fail_everything("the server is shutting down")

    def submit(self, requests: Sequence[Request]) -> JournalStream:
        """Start sequences; their events arrive at the stream returned, in order per sequence."""
        stream = JournalStream(self, dict.fromkeys(request.request_id for request in requests))
        for request in requests:
            entries = self._journal.setdefault(request.request_id, {})
            entries[request.choice] = _Entry(request, stream)
        if self.failure is not None:
            for request in requests:
                self._fail(request.request_id, request.choice, self.failure)
        elif self._side is not None:
            self._side.send(Commands(submit=tuple(requests)))
        return stream

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown or finished ones are ignored."""
        if self._journal.pop(request_id, None) is not None and self._side is not None:
            self._side.send(Commands(cancel=(request_id,)))

    async def _supervise(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self._live_once()
            except ray.exceptions.RayTaskError as error:
                if self._information is None:
                    self.failure = str(error.cause)
                    self.health_reason = f"the engine could not start: {self.failure}"
                    logger.error(self.health_reason)
                    self._fail_everything(self.health_reason)
                    return
                logger.error("the engine raised: %s", error)
            except ray.exceptions.RayError as error:
                logger.error("the engine died: %s", str(error).splitlines()[0])
            except Exception:
                logger.exception("the engine could not be supervised")
            self.restarts += 1
            self._bury()
            if time.monotonic() - started < RESTART_PAUSE_SECONDS:
                await asyncio.sleep(RESTART_PAUSE_SECONDS)

    async def _live_once(self) -> None:
        """One engine from its start to its death (raises a Ray error)."""
        endpoints = private_endpoints()
        side = ClientSide(endpoints)
        self._actor = self._start_actor(self._configuration)
        tasks: list[asyncio.Task[Any]] = []
        try:
            self._information = await self._actor.load.remote()
            serving = asyncio.ensure_future(_result(self._actor.serve.remote(endpoints)))
            self._last_output = time.monotonic()
            self._side = side
            self._replay()
            self.health_reason = None
            tasks = [
                serving,
                asyncio.ensure_future(self._pump(side)),
                asyncio.ensure_future(self._watch()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._side = None
            self.health_reason = "the engine is restarting"
            for task in tasks:
                task.cancel()
            ray.kill(self._actor)
            side.close()
            folder = Path(endpoints.commands.removeprefix("ipc://")).parent
            shutil.rmtree(folder, ignore_errors=True)  # something may have cleared /tmp

    async def _pump(self, side: ClientSide) -> None:
        while True:
            output = await side.receive()
            self._last_output = time.monotonic()
            self._route(output)

    async def _watch(self) -> None:
        """An engine that says nothing for a minute (idle ones speak every second) is dead."""
        while time.monotonic() - self._last_output < STALL_SECONDS:
            await asyncio.sleep(1.0)
        raise ray.exceptions.RayError(f"no word from the engine for {STALL_SECONDS:.0f} s")

    def _route(self, output: StepOutput) -> None:
        self.statistics = output.statistics
        for event in output.events:
            entries = self._journal.get(event.request_id)
            entry = entries.get(event.choice) if entries else None
            if entries is None or entry is None:
                continue
            entry.received.extend(event.token_ids)
            if event.finish_reason is not None:
                self._remove(event.request_id, event.choice)
            entry.stream.put(event)

    def _replay(self) -> None:
        """Hand every unfinished sequence to the new engine."""
        requests = [
            replace(entry.request, resumed_ids=tuple(entry.received))
            for entries in self._journal.values()
            for entry in entries.values()
        ]
        if requests and self._side is not None:
            logger.info("replaying %d unfinished sequences", len(requests))
            self._side.send(Commands(submit=tuple(requests)))

    def _bury(self) -> None:
        """Count a death against every unfinished sequence."""
        for request_id, entries in list(self._journal.items()):
            for choice, entry in list(entries.items()):
                entry.deaths += 1
                if entry.deaths >= DEATHS_PER_REQUEST:
                    self._fail(
                        request_id, choice, "the engine died twice while serving this request"
                    )

    def _fail_everything(self, message: str) -> None:
        for request_id, entries in list(self._journal.items()):
            for choice in list(entries):
                self._fail(request_id, choice, message)

    def _fail(self, request_id: str, choice: int, message: str) -> None:
        entry = self._journal[request_id][choice]
        self._remove(request_id, choice)
        entry.stream.put(
            SequenceEvent(request_id, choice, (), finish_reason="error", error=message)
        )

    def _remove(self, request_id: str, choice: int) -> None:
        entries = self._journal[request_id]
        del entries[choice]
        if not entries:
            del self._journal[request_id]


async def _result(reference: Any) -> Any:
    """Await a Ray object reference as a coroutine, so that it can become a task."""
    return await reference
