"""An API process's handle on the engine: submit, stream, cancel, and survive its death.

Every unfinished sequence stands in a journal with the tokens its client has already received.
When the engine dies, a new one is started and the journal is replayed: the same seed gives the
same continuation, so open streams go on where they stopped. A request that two engines died with
is taken to be the cause and ends with an error. A failed start counts against none; after
`STARTS_WAITED_FOR` of them the wait is over. An engine that could not be made is not started again,
and where more have died before any was ready there is taken to be none.

Several API processes share one engine: the first starts it, the others find it. When an
API process dies, the engine cancels what it had asked for, and goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from lexshard.actors.configuration import EngineConfiguration, EngineInformation
from lexshard.actors.faults import LoggedFault
from lexshard.actors.messages import Commands, Drafts, EngineStatistics, Request, StepOutput
from lexshard.actors.role import RunningRole
from lexshard.cluster.engine.handle import (
    EngineHandle,
    EngineHost,
    EngineLocation,
    EngineRaisedError,
    Suitability,
)
from lexshard.cluster.engine.journal import Journal, JournalStream
from lexshard.cluster.engine.pulse import Pulse
from lexshard.cluster.engine.transport import ClientSide
from lexshard.cluster.link import PeerLostError
from lexshard.cluster.private_folder import remove_abandoned_folders

logger = logging.getLogger("lexshard.engine")

# An engine that neither speaks nor computes is replaced after a minute. A step of one that computes
# may take longer, and one with shards or ranks elsewhere may wait for Ray to place them.
STALL_SECONDS = 60.0
LONGEST_STEP_SECONDS = 900.0
RESTART_PAUSE_SECONDS = 5.0
STARTS_WAITED_FOR = 3  # that fail one after the other
LOOK_SECONDS = 0.5
REASON_SECONDS = 2.0
FAREWELL_SECONDS = 3.0
STARTING = "the engine is starting (a first start compiles its kernels, which takes a minute)"
RESTARTING = "the engine is restarting"
OCCUPIED = "another engine serves others here: this one starts when that one has ended"
SUSPENDED = "the engine's process does not run at the moment"
SHUTTING_DOWN = "the server is shutting down"
FILES_CHANGED = "the model's files have changed: start the server again"
NEVER_READY = "it died again and again before it was ready (out of memory?): the log says how"
NOT_STARTED_AGAIN = "the engine died and could not be started again; the server's log says why"


NOTHING_HEARD = EngineStatistics()  # told as a client's until its engine has spoken
Answer = TypeVar("Answer")


class EngineReplacedError(Exception):
    """Where this client's engine was is one that would go on with other tokens, or another
    server's."""


class EngineSupervisor:
    """Finds an engine at ``host`` or has it started, keeps one alive, and routes its events. Lives
    in one event loop."""

    def __init__(self, configuration: EngineConfiguration, host: EngineHost) -> None:
        self._configuration = configuration
        self._host = host
        self._journal = Journal()
        self._streams: set[JournalStream] = set()
        self._side: ClientSide | None = None
        self._pulse: Pulse | None = None
        self._engine: EngineHandle | None = None
        self._found = False  # the engine was there before
        self._lost = 0  # engines since one was ready, that one too
        self._supervision: asyncio.Task[None] | None = None
        self._information: EngineInformation | None = None
        self._stopping = False
        self.statistics = NOTHING_HEARD
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
        self._start_or_find()
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """End the engine. No request is taken any more; open streams have ``grace_seconds`` to
        come to their end, and those that do not are told why they stop."""
        self._stopping = True
        self._set_health(SHUTTING_DOWN)
        await until(lambda: not self._journal, grace_seconds)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        self._journal.end_everything("abort", SHUTTING_DOWN)
        await until(lambda: not self._streams, FAREWELL_SECONDS)  # their last words are sent
        if self._side is not None:  # the engine ends with the last client that says so
            self._side.send(Commands(stop=True))
            await asyncio.wait((self._side.lost,), timeout=FAREWELL_SECONDS)
            self._side.close()
            self._side = self._engine = None
        elif self._engine is not None:
            self._engine.kill()

    async def roles(self) -> Sequence[RunningRole]:
        """The roles of the engine and where they are; none where it does not answer."""
        if self._engine is None:
            return []
        return await _answer_in_time(self._engine.roles())

    async def faults(self) -> Sequence[LoggedFault]:
        """What has gone wrong in the engine last; nothing where it does not answer."""
        if self._engine is None:
            return []
        return await _answer_in_time(self._engine.faults())

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
        else:
            self._ask_for(requests)
        return stream

    def draft(self, drafts: Drafts) -> None:
        """Guesses for a sequence that waits for them; those for others are ignored."""
        if self._journal.note_drafts(drafts) and self._side is not None:
            self._side.send(Commands(drafts=(drafts,)))

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
        restarted = -math.inf
        while True:
            try:
                if not await self._live_once():
                    await asyncio.sleep(LOOK_SECONDS)  # until the name of what was there is free
                    continue
            except EngineReplacedError as error:
                self._give_up(str(error))
                return
            except EngineRaisedError as error:
                if self._information is None:
                    self._give_up(str(error))
                    return
                logger.error("the engine raised: %s", error)
            except PeerLostError as error:
                logger.error("the engine died: %s", error)
            except Exception:
                logger.exception("the engine could not be supervised")
            self.restarts += 1
            self._lost += 1
            self._journal.count_death()
            if self._lost > STARTS_WAITED_FOR:
                if self._information is None:
                    self._give_up(NEVER_READY)  # until one is, nevertheless
                self._journal.end_everything("error", NOT_STARTED_AGAIN)
            if time.monotonic() - restarted < RESTART_PAUSE_SECONDS:
                await asyncio.sleep(RESTART_PAUSE_SECONDS)
            restarted = time.monotonic()

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._set_health(f"the engine could not start: {reason}")
        logger.error(self.health_reason)
        self._journal.end_everything("error", reason)

    def _start_or_find(self) -> None:
        self._found = self._host.find() is not None
        self._engine = self._host.start(self._configuration)

    async def _live_once(self) -> bool:
        """With one engine from its start to its death.

        False where there may be another one, or the same, a moment later.

        Raises:
            PeerLostError, EngineRaisedError: how it has ended.
        """
        if self._engine is None:
            self._start_or_find()
        engine = self._engine
        assert engine is not None
        tasks: list[asyncio.Future[Any]] = []
        try:
            if not await self._suits(engine):
                return False
            serving = asyncio.ensure_future(engine.ended())
            tasks.append(serving)
            location = await self._located(engine)
            if location is None:
                self._bury()
                return False
            known = self._information
            if known is not None and known.files != location.information.files:
                self._engine = None  # it stays, for API processes that begin with these files
                raise EngineReplacedError(FILES_CHANGED)
            self._found = False  # from now on its death is one that was seen
            self._information = location.information
            self._pulse = Pulse(location.information.process_id)
            self._side = await ClientSide.connect(location.path, self._hear)
            self._lost = 0
            self.failure = None
            self._replay()
            self._set_health(None)
            tasks.append(asyncio.ensure_future(self._watch(self._pulse)))
            lost = self._side.lost
            await asyncio.wait((*tasks, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():  # it is known why a moment later
                await asyncio.wait((serving,), timeout=REASON_SECONDS)
            for task in tasks:
                if task.done():
                    task.result()
            if serving.done():
                raise PeerLostError("it has ended")
            self._set_health(RESTARTING)  # it lives, but not with us: it was not heard for long
            self._side = self._pulse = None
            self.statistics = NOTHING_HEARD
            return False
        except EngineRaisedError:
            if self._information is not None:
                self._bury()
            raise  # what could not be loaded stays, to tell other API processes why
        except Exception:
            self._bury()
            raise
        finally:
            for task in tasks:
                if not task.cancel() and not task.cancelled():
                    task.exception()  # has been told

    async def _suits(self, engine: EngineHandle) -> bool:
        """False where what is there is not for this client, which may look again a moment later.

        Raises:
            EngineReplacedError: it was, and never will be again.
        """
        try:
            answer = await engine.suits(self._configuration)
        except PeerLostError:
            if not self._found:
                raise
            self._bury()  # it was about to end
            return False
        if answer is Suitability.SUITABLE:
            if self.health_reason is OCCUPIED:
                self._set_health(STARTING)
            return True
        if answer is Suitability.DESERTED:
            self._bury()
            return False
        self._engine = None
        if self._information is not None:
            raise EngineReplacedError("an engine of another configuration has taken its place")
        self._set_health(OCCUPIED)
        return False

    async def _located(self, engine: EngineHandle) -> EngineLocation | None:
        """Where the engine is; None where the one that was there has just ended."""
        try:
            return await engine.located()
        except PeerLostError:
            if self._found:
                return None
            raise

    def _bury(self) -> None:
        """Leaves nothing of an engine that does not answer."""
        if self._information is not None:
            self._set_health(RESTARTING)
        if self._side is not None:
            self._side.close()
        self._side = self._pulse = None
        self.statistics = NOTHING_HEARD
        if self._engine is not None:
            self._engine.kill()
        self._engine = None

    def _hear(self, output: StepOutput) -> None:
        if self._pulse is not None:
            self._pulse.heard()
        if self.health_reason is SUSPENDED:
            self._set_health(None)
        if output.statistics is not None:
            self.statistics = output.statistics
        self._journal.record(output.events)

    async def _watch(self, pulse: Pulse) -> None:
        """New requests are refused while the engine neither speaks nor computes; after
        `STALL_SECONDS` of that, or `LONGEST_STEP_SECONDS` of silence, it is taken for dead."""
        configuration = self._configuration
        waits = configuration.shards > 1 or (configuration.tensor_parallel or 1) > 1
        stall = LONGEST_STEP_SECONDS if waits else STALL_SECONDS
        while True:
            quiet = pulse.look()
            if pulse.idleness >= stall or pulse.silence >= LONGEST_STEP_SECONDS:
                raise PeerLostError(f"no word from the engine for {pulse.silence:.0f} s")
            if quiet and self.ready:
                logger.error("%s: no word for %.1f s", SUSPENDED, pulse.silence)
                self._set_health(SUSPENDED)
            await asyncio.sleep(LOOK_SECONDS)

    def _replay(self) -> None:
        """Hand every unfinished sequence to the new engine."""
        requests = self._journal.continuations()
        if requests:
            logger.info("replaying %d unfinished sequences", len(requests))
            self._ask_for(requests)
        for drafts in self._journal.drafts():
            if self._side is not None:
                self._side.send(Commands(drafts=(drafts,)))

    def _ask_for(self, requests: Sequence[Request]) -> None:
        """Hands them to the engine, if there is one; else they wait in the journal for the next."""
        if self._side is not None and self._side.send(Commands(submit=tuple(requests))):
            self._journal.hand_over(requests)


async def _answer_in_time(answer: Awaitable[Sequence[Answer]]) -> Sequence[Answer]:
    """Nothing where there is none."""
    try:
        return await asyncio.wait_for(answer, REASON_SECONDS)
    except (PeerLostError, EngineRaisedError, TimeoutError):
        return []


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for a condition, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
