"""One engine as its users see it, wherever it runs: in a plain process, or as a Ray actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from lexshard.actors.configuration import EngineConfiguration, EngineInformation
from lexshard.actors.faults import LoggedFault
from lexshard.actors.role import RunningRole


class EngineRaisedError(Exception):
    """The engine could not be made, or has failed; with what was raised there."""


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """What an engine is, and the socket file where it hears and speaks."""

    information: EngineInformation
    path: str


class Suitability(Enum):
    """Whether an engine is for the API process that has found it."""

    SUITABLE = "it serves this configuration"
    OCCUPIED = "it serves others, with another configuration"
    DESERTED = "it has another configuration, and serves no client"


class EngineHandle(Protocol):
    """Every question raises `cluster.link.PeerLostError` where there is no engine to answer it.
    Used in one event loop."""

    async def suits(self, configuration: EngineConfiguration) -> Suitability: ...

    async def located(self) -> EngineLocation | None:
        """Where to connect, as soon as the engine is warm; None of one that has just ended.

        Raises:
            EngineRaisedError: it could not be made.
        """

    async def ended(self) -> None:
        """Returns when the engine has ended as it was told to.

        Raises:
            PeerLostError: it was killed.
            EngineRaisedError: it has failed.
        """

    async def roles(self) -> Sequence[RunningRole]:
        """The roles and where they are; empty before the engine is made."""

    async def faults(self) -> Sequence[LoggedFault]:
        """What has gone wrong last in the engine's process."""

    def kill(self) -> None:
        """Ends it at once; one that has ended is no error."""


class EngineHost(Protocol):
    """Where engines are found and started."""

    def find(self) -> EngineHandle | None:
        """The engine there is, started by any process."""

    def start(self, configuration: EngineConfiguration) -> EngineHandle:
        """The engine there is, else a new one."""
