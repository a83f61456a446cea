"""Engines that live, die and fail to start as a test tells them to, behind real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.faults import LoggedFault
from lexshard.actors.messages import Request, SequenceEvent, StepOutput
from lexshard.actors.role import RunningRole
from lexshard.cluster.engine.handle import (
    EngineLocation,
    EngineRaisedError,
    Suitability,
)
from lexshard.cluster.engine.transport import EngineSide
from lexshard.cluster.link import PeerLostError
from tests.support.mock_engine import MockEngine


@dataclass
class EngineToCome:
    """An `EngineHandle`. ``failure`` is what its start ends with; else it answers each request with
    one token, and goes on when it is told to. ``asked`` is what it has been handed."""

    path: Path
    failure: Exception | None = None
    asked: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._side: EngineSide | None = None
        self._died = asyncio.Event()

    async def suits(self, configuration: EngineConfiguration) -> Suitability:
        return Suitability.SUITABLE

    async def located(self) -> EngineLocation:
        if self.failure is not None:
            raise self.failure
        self._side = EngineSide(self.path)
        self._serving = asyncio.ensure_future(self._serve(self._side))
        information = replace(MockEngine().information, process_id=os.getpid())
        return EngineLocation(information, str(self.path))

    async def ended(self) -> None:
        await self._died.wait()
        raise PeerLostError("it was killed")

    async def roles(self) -> Sequence[RunningRole]:
        return []

    async def faults(self) -> Sequence[LoggedFault]:
        return []

    def kill(self) -> None:
        if self._side is not None:
            self._serving.cancel()
            self._side.close()
            self._side = None
        self._died.set()

    def finish(self, request_id: str) -> None:
        """Its last token."""
        assert self._side is not None
        event = SequenceEvent(request_id, 0, (2,), finish_reason="stop")
        self._side.emit(StepOutput((event,)))

    async def _serve(self, side: EngineSide) -> None:
        while True:
            commands = side.receive(0.0)
            if commands is None:
                await asyncio.sleep(0.005)
                continue
            if commands.stop:
                self.kill()
                return
            self.asked.extend(commands.submit)
            events = tuple(SequenceEvent(each.request_id, 0, (1,)) for each in commands.submit)
            if events:
                side.emit(StepOutput(events))


class EnginesToCome:
    """An `EngineHost`: one engine after the other, each as ``failures`` says; the last kind again
    and again."""

    def __init__(self, folder: Path, failures: Sequence[Exception | None]) -> None:
        self._folder = folder
        self._failures = failures
        self.started: list[EngineToCome] = []

    def find(self) -> None:
        """None is there that was not started here."""

    def start(self, configuration: EngineConfiguration) -> EngineToCome:
        number = len(self.started)
        failure = self._failures[min(number, len(self._failures) - 1)]
        engine = EngineToCome(self._folder / f"engine-{number}", failure)
        self.started.append(engine)
        return engine


LOST = PeerLostError("its process has ended")
RAISED = EngineRaisedError("no memory left")
