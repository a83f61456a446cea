"""What the front end asks of an engine, wherever the engine runs.

The engine lives in another process. Anything with these methods can stand behind the HTTP
application: ``cluster.engine.supervisor.EngineSupervisor`` in production, a scripted one in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.faults import LoggedFault
from lexshard.actors.messages import Drafts, EngineStatistics, Request, SequenceEvent
from lexshard.actors.role import RunningRole
from lexshard.cluster.config import ServeConfig


class EventStream(Protocol):
    """The events of the sequences of one ``submit``, in order per sequence."""

    async def arrived(self) -> Sequence[SequenceEvent]:
        """Whatever has come since the last call: at least one event."""

    def close(self) -> None:
        """Cancel what has not finished. Closing twice is harmless."""


class EngineClient(Protocol):
    """The front end's side of one engine. Every method is called in the server's event loop."""

    def submit(self, requests: Sequence[Request]) -> EventStream: ...

    def draft(self, drafts: Drafts) -> None:
        """Guesses for a sequence that waits for them; those for others are ignored."""

    def cancel(self, request_id: str) -> None:
        """Forget a request; unknown or finished ones are ignored."""

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """End the engine. No request is taken any more; open streams have ``grace_seconds`` to
        come to their end, and those that do not are told why they stop."""

    async def roles(self) -> Sequence[RunningRole]:
        """The roles of the engine and where they are; none where it does not answer."""

    async def faults(self) -> Sequence[LoggedFault]:
        """What has gone wrong in the engine last; nothing where it does not answer."""

    @property
    def ready(self) -> bool:
        """The engine is alive and its kernels are warm. Never waits on the engine loop."""

    @property
    def health_reason(self) -> str | None:
        """Why the engine is not ready; None when it is."""

    @property
    def failure(self) -> str | None:
        """Why no engine will ever be ready; None while there is hope."""

    @property
    def restarts(self) -> int:
        """How many engines were lost and replaced."""

    @property
    def statistics(self) -> EngineStatistics: ...

    @property
    def information(self) -> EngineInformation:
        """Available once ``ready`` has been true."""


EngineConnector = Callable[[ServeConfig], EngineClient]
"""Makes a replica's client and starts it. Called once, inside the replica's event loop."""
