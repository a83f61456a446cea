"""A `Collective` whose root speaks with every other process by itself.

Messages are small and the root must hear from all in any case: in a star each takes one hop,
and the root knows at once which is missing. Rings and trees would share out the root's traffic,
which only hidden states have enough of; between GPUs they go another way (``device``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.collective import ROOT, CollectiveError, Operation, Traffic, no_traffic
from lexshard.cluster.collective.nccl_links import NcclLinks

# What a message begins with: its length, and as much of it as fits. Nearly all of them fit, and a
# second transfer costs more than the rest of a packet that is on its way.
FRAME_BYTES = 1024
_LENGTH_BYTES = 8
_FIRST_BYTES = FRAME_BYTES - _LENGTH_BYTES
# So much longer the others wait for the root: it may be waiting for one of them, and knows which.
ROOT_GRACE_SECONDS = 0.5


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self, seconds: float | None) -> None:
        """Returns when they have been taken over at this end. None waits as long as it takes.

        Raises `CollectiveTimeoutError` or `CollectiveLostError` with the rank at the other end.
        """


class Links(Protocol):
    """Connections of process ``rank`` to all others of ``size``. What is sent to one arrives there
    in order. Tensors are contiguous, on the CPU, and stay as they are until the wait is over."""

    rank: int
    size: int

    def send(self, data: torch.Tensor, rank: int) -> Transfer: ...

    def receive(self, into: torch.Tensor, rank: int) -> Transfer: ...

    def close(self) -> None:
        """Ends the connections, so that the others notice. Closing twice is harmless."""


class StarCollective:
    """The group that ``links`` connect. See `actors.collective.Collective`.

    ``seconds`` is how long any process may keep another waiting in the midst of a step: longer than
    a shard ever computes between two exchanges. ``device`` carries hidden states where there is
    one, otherwise they go as other messages do.
    """

    def __init__(self, links: Links, seconds: float, device: NcclLinks | None = None) -> None:
        self.rank = links.rank
        self.size = links.size
        self._traffic = no_traffic()
        self.traffic: Mapping[Operation, Traffic] = self._traffic
        self._links = links
        self._seconds = seconds if self.rank == ROOT else seconds + ROOT_GRACE_SECONDS
        self._device = device
        self._others = tuple(rank for rank in range(self.size) if rank != ROOT)
        self._failed: CollectiveError | None = None

    def broadcast(self, message: bytes | None = None, *, patient: bool = False) -> bytes:
        with self._traffic["message"].measured() as traffic:
            if self.rank != ROOT:
                return self._receive([ROOT], traffic, patient=patient)[0]
            assert message is not None
            self._send(message, self._others, traffic)
            return message

    def broadcast_hidden(
        self, hidden: torch.Tensor | None, rows: int, columns: int
    ) -> torch.Tensor:
        device = torch.device("cpu") if self._device is None else self._device.device
        if hidden is None:
            states = torch.empty((rows, columns), dtype=torch.float32, device=device)
        else:
            states = hidden.to(device).contiguous()
        with self._traffic["hidden"].measured() as traffic:
            if self._device is not None:
                self._device.broadcast(states)
                if self.rank == ROOT:
                    traffic.bytes_sent += states.nbytes
                else:
                    traffic.bytes_received += states.nbytes
            elif self.rank == ROOT:
                self._send_bytes(states, self._others, traffic)
            else:
                self._receive_bytes([states], [ROOT], traffic)
        return states

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        with self._traffic["maximum"].measured() as traffic:
            if self.rank != ROOT:
                largest = torch.empty(len(values), dtype=torch.float64)
                self._send_bytes(torch.from_numpy(values), [ROOT], traffic)
                self._receive_bytes([largest], [ROOT], traffic)
                return largest.numpy()
            parts = [torch.empty(len(values), dtype=torch.float64) for _ in self._others]
            self._receive_bytes(parts, self._others, traffic)
            found = np.maximum.reduce([values, *(part.numpy() for part in parts)])
            self._send_bytes(torch.from_numpy(found), self._others, traffic)
            return found

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        with self._traffic["gather"].measured() as traffic:
            if self.rank != ROOT:
                self._send(message, [ROOT], traffic)
                return ()
            return (message, *self._receive(self._others, traffic))

    def barrier(self) -> None:
        with self._traffic["barrier"].measured() as traffic:
            here = torch.zeros(1, dtype=torch.uint8)
            if self.rank == ROOT:
                self._receive_bytes([here.clone() for _ in self._others], self._others, traffic)
                self._send_bytes(here, self._others, traffic)
            else:
                self._send_bytes(here, [ROOT], traffic)
                self._receive_bytes([here], [ROOT], traffic)

    def close(self) -> None:
        if self._failed is None:
            self._failed = CollectiveError("this process has left its group")
        if self._device is not None:
            self._device.close()
        self._links.close()

    # -- messages of any length -------------------------------------------------------------------

    def _send(self, message: bytes, ranks: Iterable[int], traffic: Traffic) -> None:
        frame = np.zeros(FRAME_BYTES, np.uint8)
        frame[:_LENGTH_BYTES].view(np.int64)[0] = len(message)
        data = np.frombuffer(message, np.uint8)
        frame[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data[:_FIRST_BYTES]
        self._send_bytes(torch.from_numpy(frame), ranks, traffic)
        if len(data) > _FIRST_BYTES:
            self._send_bytes(torch.from_numpy(data[_FIRST_BYTES:].copy()), ranks, traffic)

    def _receive(
        self, ranks: Iterable[int], traffic: Traffic, *, patient: bool = False
    ) -> list[bytes]:
        ranks = list(ranks)
        frames = [torch.empty(FRAME_BYTES, dtype=torch.uint8) for _ in ranks]
        self._receive_bytes(frames, ranks, traffic, patient=patient)
        lengths = [int(frame[:_LENGTH_BYTES].view(torch.int64)) for frame in frames]
        rests = {
            rank: torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
            for rank, length in zip(ranks, lengths, strict=True)
            if length > _FIRST_BYTES
        }
        self._receive_bytes(list(rests.values()), list(rests), traffic)
        messages = []
        for rank, length, frame in zip(ranks, lengths, frames, strict=True):
            first = frame.numpy()[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
            messages.append(first + rests[rank].numpy().tobytes() if rank in rests else first)
        return messages

    # -- bytes of known length --------------------------------------------------------------------

    def _send_bytes(self, data: torch.Tensor, ranks: Iterable[int], traffic: Traffic) -> None:
        def start() -> list[Transfer]:
            return [self._links.send(data, rank) for rank in ranks]

        traffic.bytes_sent += data.nbytes * self._complete(start, self._seconds)

    def _receive_bytes(
        self,
        into: list[torch.Tensor],
        ranks: Iterable[int],
        traffic: Traffic,
        *,
        patient: bool = False,
    ) -> None:
        def start() -> list[Transfer]:
            return [self._links.receive(each, rank) for each, rank in zip(into, ranks, strict=True)]

        self._complete(start, None if patient else self._seconds)
        traffic.bytes_received += sum(each.nbytes for each in into)

    def _complete(self, start: Callable[[], list[Transfer]], seconds: float | None) -> int:
        """Starts transfers and waits for all of them; how many they were."""
        if self._failed is not None:
            raise self._failed
        transfers: list[Transfer] = []
        try:
            transfers += start()
            for transfer in transfers:
                transfer.wait(seconds)
        except CollectiveError as error:
            # Connections are open as long as anything is under way, also in a traceback.
            transfers.clear()
            self._failed = error
            raise
        return len(transfers)
