"""What the processes that hold one output head ask of each other: a few collectives, counted.

`actors.head.sharded` says which of them a step takes. Here is what they promise, what goes wrong
with them, and the group of one process, for which there is nothing to do. Groups of several live
in `cluster.collective`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

ROOT = 0
Operation = Literal["message", "hidden", "maximum", "gather", "barrier"]
OPERATIONS: tuple[Operation, ...] = ("message", "hidden", "maximum", "gather", "barrier")


class CollectiveError(RuntimeError):
    """The group is out of step and of no more use: close it and form another one.

    ``rank`` is the process that is missing, None where it is not known which.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CollectiveTimeoutError(CollectiveError):
    """A process did not take part in time: it hangs, it was stopped, or nothing reaches it."""


class CollectiveLostError(CollectiveError):
    """A process has gone, or has left the group."""


@dataclass(slots=True)
class Traffic:
    """What one kind of operation has cost this process. Bytes are those handed to the network:
    lengths and padding included, its own headers not. Waiting for others counts as time."""

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    microseconds: float = 0.0

    def go_on_from(self, before: Traffic) -> None:
        """Counts what another group has cost as if it were this one's, too."""
        self.calls += before.calls
        self.bytes_sent += before.bytes_sent
        self.bytes_received += before.bytes_received
        self.microseconds += before.microseconds

    @contextmanager
    def measured(self) -> Iterator[Traffic]:
        """One call, timed from here to the end."""
        started = time.perf_counter()
        try:
            yield self
        finally:
            self.calls += 1
            self.microseconds += 1e6 * (time.perf_counter() - started)


def no_traffic() -> dict[Operation, Traffic]:
    """Nothing of any kind, to count from."""
    return {operation: Traffic() for operation in OPERATIONS}


class Rounds(Protocol):
    """What a step of a sharded head needs of a group of ``size`` processes, this one being
    ``rank``; rank 0 is the root. All processes call the same operations in the same order.
    """

    rank: int
    size: int

    def broadcast(self, message: bytes | None = None, *, patient: bool = False) -> bytes:
        """The root's message, everywhere; the others give none.

        Who waits ``patient`` has no time-out: the root may have nothing to say for hours. That it
        has gone is noticed all the same.
        """
        ...

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The largest of all processes' ``values`` [n], none of them NaN, entry by entry."""
        ...

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        """Every process' message, of any length, in order of rank at the root; () elsewhere."""
        ...


class Collective(Rounds, Protocol):
    """A group that lives for its head alone. Each operation raises `CollectiveTimeoutError` or
    `CollectiveLostError` where another process does not do its part; from then on every one does.
    One thread uses it.
    """

    traffic: Mapping[Operation, Traffic]

    def broadcast_hidden(
        self, hidden: torch.Tensor | None, rows: int, columns: int
    ) -> torch.Tensor:
        """The root's hidden states [rows, columns] fp32, everywhere, where the shard needs them."""
        ...

    def barrier(self) -> None:
        """Returns when every process has come here; connections are open from then on."""
        ...

    def close(self) -> None:
        """Leaves the group: the others notice at once. Closing twice is harmless."""
        ...


@dataclass(slots=True)
class SingleProcess:
    """The group of a head that lives in one process: what is exchanged is what there is."""

    rank: int = ROOT
    size: int = 1
    traffic: Mapping[Operation, Traffic] = field(default_factory=no_traffic)

    def broadcast(self, message: bytes | None = None, *, patient: bool = False) -> bytes:
        assert message is not None
        return message

    def broadcast_hidden(
        self, hidden: torch.Tensor | None, rows: int, columns: int
    ) -> torch.Tensor:
        assert hidden is not None
        return hidden

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return values

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        return (message,)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
