"""The API process's handle on the engine: submit, stream, cancel, and survive its death.

Every unfinished sequence stands in a journal with the tokens its client has already received.
When the engine dies, a new one is started and the journal is replayed: the same seed gives the
same continuation, so open streams go on where they stopped. A request that was running through
two deaths is taken to be their cause and ends with an error.

When it is this process that dies, the engine stays, and the supervisor of the next replica takes
it over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from actors.configuration import EngineConfiguration, EngineInformation
from actors.messages import Commands, EngineStatistics, Request, StepOutput
from cluster.engine.journal import Journal, JournalStream
from cluster.engine.process import running_engine_actor, start_engine_actor
from cluster.engine.pulse import Pulse
from cluster.engine.transport import ClientSide, Endpoints, endpoints_in
from cluster.private_folder import PrivateFolder, remove_abandoned_folders

logger = logging.getLogger("lexshard.engine")

STALL_SECONDS = 60.0
RESTART_PAUSE_SECONDS = 5.0
LOOK_SECONDS = 0.5
BURIAL_SECONDS = 10.0
ATTACH_SECONDS = 5.0
FAREWELL_SECONDS = 3.0
STARTING = "the engine is starting (a first start compiles its kernels: about a minute)"
RESTARTING = "the engine is restarting"
SUSPENDED = "the engine's process does not run at the moment"
SHUTTING_DOWN = "the server is shutting down"


class EngineSupervisor:
    """Starts an engine, keeps one alive, and routes its events. Lives in one event loop."""

    def __init__(
        self,
        configuration: EngineConfiguration,
        start_actor: Callable[[EngineConfiguration], Any] = start_engine_actor,
    ) -> None:
        self._configuration = configuration
        self._start_actor = start_actor
        self._journal = Journal()
        self._streams: set[JournalStream] = set()
        self._side: ClientSide | None = None
        self._actor: Any = None
        self._left_behind = False  # by another supervisor, of a replica that is gone
        self._supervision: asyncio.Task[None] | None = None
        self._information: EngineInformation | None = None
        self._stopping = False
        self.statistics = EngineStatistics()
        self.restarts = 0
        self.failure: str | None = None
        self.health_reason: str | None = STARTING

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
        """Begin supervising; call once, inside the event loop. A first engine starts at once,
        whatever the caller does before it lets the loop go on."""
        remove_abandoned_folders()
        self._actor = running_engine_actor()
        self._left_behind = self._actor is not None
        if not self._left_behind:
            self._actor = self._start_actor(self._configuration)
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """End the engine. No request is taken any more; open streams have ``grace_seconds`` to
        come to their end, and those that do not are told why they stop."""
        self._stopping = True
        self._set_health(SHUTTING_DOWN)
        await _until(lambda: not self._journal, grace_seconds)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._journal.end_everything("abort", SHUTTING_DOWN)
        await _until(lambda: not self._streams, FAREWELL_SECONDS)  # their last words are sent

    def submit(self, requests: Sequence[Request]) -> JournalStream:
        """Start sequences; their events arrive at the stream returned, in order per sequence."""
        names = dict.fromkeys(request.request_id for request in requests)
        stream = JournalStream(names, self._close)
        self._streams.add(stream)
        self._journal.enter(requests, stream)
        if self._stopping:
            self._journal.refuse(requests, "abort", SHUTTING_DOWN)
        elif self.failure is not None:
            self._journal.refuse(requests, "error", self.failure)
        elif self._side is not None:
            self._side.send(Commands(submit=tuple(requests)))
        return stream

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown or finished ones are ignored."""
        if self._journal.forget(request_id) and self._side is not None:
            self._side.send(Commands(cancel=(request_id,)))

    def _set_health(self, reason: str | None) -> None:
        self.health_reason = SHUTTING_DOWN if self._stopping else reason

    def _close(self, stream: JournalStream) -> None:
        self._streams.discard(stream)
        for request_id in stream.request_ids:
            self.cancel(request_id)

    async def _supervise(self) -> None:
        while True:
            started = time.monotonic()
            try:
                await self._live_once()
            except ray.exceptions.RayTaskError as error:
                if self._information is None:
                    self.failure = str(error.cause)
                    self._set_health(f"the engine could not start: {self.failure}")
                    logger.error(self.health_reason)
                    self._journal.end_everything("error", self.failure)
                    return
                logger.error("the engine raised: %s", error)
            except ray.exceptions.RayError as error:
                logger.error("the engine died: %s", str(error).splitlines()[0])
            except Exception:
                logger.exception("the engine could not be supervised")
            self.restarts += 1
            self._journal.count_death()
            if time.monotonic() - started < RESTART_PAUSE_SECONDS:
                await asyncio.sleep(RESTART_PAUSE_SECONDS)

    async def _live_once(self) -> None:
        """One engine from its start to its death (raises a Ray error)."""
        folder = PrivateFolder()
        endpoints = endpoints_in(folder.path)
        side = ClientSide(endpoints)
        tasks: list[asyncio.Task[Any]] = []
        try:
            serving = asyncio.ensure_future(_result(await self._serving(endpoints)))
            pulse = Pulse(self.information.process_id)
            self._side = side
            self._replay()
            self._set_health(None)
            tasks = [
                serving,
                asyncio.ensure_future(self._pump(side, pulse)),
                asyncio.ensure_future(self._watch(pulse)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._side = None
            self._set_health(RESTARTING)
            for task in tasks:
                task.cancel()
            if self._actor is not None:
                ray.kill(self._actor)
                self._actor = None
            side.close()
            folder.remove()

    async def _serving(self, endpoints: Endpoints) -> Any:
        """A reference that ends when the engine does, which now serves at ``endpoints``: the one
        that a lost replica has left, else a new one."""
        if self._left_behind:
            self._left_behind = False
            self._information = await _attached(self._actor, self._configuration, endpoints)
            if self._information is not None:
                logger.info("the engine goes on; the replica that started it is gone")
                return self._actor.wait.remote()
            ray.kill(self._actor)
            self._actor = None
        if self._actor is None:
            self._actor = await self._start_again()
        self._information = await self._actor.load.remote()
        return self._actor.serve.remote(endpoints)

    async def _start_again(self) -> Any:
        """A new actor under the name of the one before, as soon as that is free."""
        deadline = time.monotonic() + BURIAL_SECONDS
        while True:
            try:
                return self._start_actor(self._configuration)
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _pump(self, side: ClientSide, pulse: Pulse) -> None:
        while True:
            output: StepOutput = await side.receive()
            pulse.heard()
            if self.health_reason is SUSPENDED:
                self._set_health(None)
            self.statistics = output.statistics
            self._journal.record(output.events)

    async def _watch(self, pulse: Pulse) -> None:
        """New requests are refused while the engine neither speaks nor computes; after a minute of
        silence it is taken for dead."""
        while pulse.silence < STALL_SECONDS:
            if pulse.look() and self.ready:
                logger.error("%s: no word for %.1f s", SUSPENDED, pulse.silence)
                self._set_health(SUSPENDED)
            await asyncio.sleep(LOOK_SECONDS)
        raise ray.exceptions.RayError(f"no word from the engine for {STALL_SECONDS:.0f} s")

    def _replay(self) -> None:
        """Hand every unfinished sequence to the new engine."""
        requests = self._journal.continuations()
        if requests and self._side is not None:
            logger.info("replaying %d unfinished sequences", len(requests))
            self._side.send(Commands(submit=tuple(requests)))


async def _attached(
    actor: Any, configuration: EngineConfiguration, endpoints: Endpoints
) -> EngineInformation | None:
    """What an engine is that serves at ``endpoints`` from now on; None where it cannot."""
    try:
        attaching = _result(actor.attach.remote(configuration, endpoints))
        information: EngineInformation | None = await asyncio.wait_for(attaching, ATTACH_SECONDS)
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return information


async def _result(reference: Any) -> Any:
    """Await a Ray object reference as a coroutine, so that it can become a task."""
    return await reference


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for a condition, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
