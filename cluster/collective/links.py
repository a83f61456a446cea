"""What a `StarCollective` is made of: bytes from one process to another, with a time-out each."""

from __future__ import annotations

from typing import Protocol

import torch


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self, seconds: float | None) -> None:
        """Returns when they have been taken over at this end. None waits as long as it takes.

        Raises `CollectiveTimeoutError` or `CollectiveLostError` with the rank at the other end.
        """
        ...


class Links(Protocol):
    """Connections of process ``rank`` to all others of ``size``.

    What is sent to one process arrives there in order. Tensors are contiguous, on the CPU, and stay
    as they are until the wait is over.
    """

    rank: int
    size: int

    def send(self, data: torch.Tensor, rank: int) -> Transfer: ...

    def receive(self, into: torch.Tensor, rank: int) -> Transfer: ...

    def close(self) -> None:
        """Ends the connections, so that the others notice. Closing twice is harmless."""
        ...


class DeviceLinks(Protocol):
    """What carries hidden states from GPU to GPU."""

    device: torch.device

    def broadcast(self, hidden: torch.Tensor) -> None:
        """Fills ``hidden`` [N, d], on ``device``, with the root's, in order of the stream."""
        ...

    def close(self) -> None: ...
