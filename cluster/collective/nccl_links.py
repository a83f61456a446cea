"""Hidden states from GPU to GPU by NCCL, called through cupy.

NCCL refuses two ranks on one device and has no time-out. Where a group ends while a broadcast
waits for a process that has gone, its communicator is aborted; a `Watchdog` ends the process where
nothing else has ended it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

import torch
from torch.distributed import Store

from lexshard.actors.collective import ROOT, CollectiveLostError
from lexshard.cluster.collective.watchdog import Watchdog, end_process

# In NCCL's header; older versions of cupy do not say it.
NCCL_BFLOAT16 = 9


class Broadcast(Protocol):
    """NCCL's, of fp32 tensors."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fills the tensor with the root's, in order of the current stream."""

    def abort(self) -> None:
        """Ends what has been started and waits for others; nothing is broadcast after it."""


@contextmanager
def _of_nccl() -> Iterator[None]:
    """What cupy raises for NCCL is an error of the group."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveLostError(f"NCCL: {error}") from error


def own_gpu(device: torch.device) -> str | None:
    """Which GPU ``device`` is, of all there are anywhere; None where NCCL cannot carry from it: it
    is none, or there is no cupy."""
    if device.type != "cuda" or find_spec("cupy") is None:
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def is_each_apart(gpus: Sequence[str | None]) -> bool:
    """Whether processes on these GPUs (`own_gpu`) can be a group of NCCL."""
    return None not in gpus and len(set(gpus)) == len(gpus)


class NcclLinks:
    """Broadcasts of tensors on ``device``, watched. ``connect`` gives the group
    (`CupyGroup`); it is called here, and once more for nothing, so that no step waits for
    what a communicator does first.
    """

    def __init__(
        self,
        connect: Callable[[], Broadcast],
        device: torch.device,
        seconds: float,
        forming_seconds: float = 60.0,
        bite: Callable[[str], None] = end_process,
    ) -> None:
        self.device = device
        forming = Watchdog(forming_seconds, bite)
        formed: list[bool] = []
        forming.expect("forming the NCCL group", lambda: bool(formed))
        try:
            with torch.cuda.device(device), _of_nccl():
                self._group = connect()
                self._group.broadcast(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        finally:
            formed.append(True)
            forming.close()
        self._watchdog = Watchdog(seconds, bite)
        self._closed = False

    def broadcast(self, hidden: torch.Tensor) -> None:
        started: list[torch.cuda.Event] = []
        # The call itself may hang as well.
        self._watchdog.expect(
            "broadcast of hidden states by NCCL", lambda: bool(started) and started[0].query()
        )
        with _of_nccl():
            self._group.broadcast(hidden)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        started.append(event)

    def close(self) -> None:
        """Nothing of the group stays in the device's streams. Closing twice is harmless.

        It is aborted where nothing waits in it, too: its communicator's own end would wait for
        the others', one of which may have gone.
        """
        self._watchdog.close()
        if not self._closed:
            self._closed = True
            self._group.abort()


class CupyGroup:
    """NCCL's through cupy, in a communicator of its own whose identity the root leaves in ``store``
    under ``name``. Calls are in order of the tensor's current stream."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        from cupy.cuda import nccl  # finds the library that torch has loaded

        if rank == ROOT:
            made = nccl.get_unique_id()  # bytes, before cupy 14 integers
            store.set(name, json.dumps([isinstance(made, bytes), *made]))
        is_bytes, *numbers = json.loads(store.get(name))
        identity = bytes(numbers) if is_bytes else tuple(numbers)
        self._communicator = nccl.NcclCommunicator(size, identity, rank)
        self._sum = nccl.NCCL_SUM
        self._types = {
            torch.float32: nccl.NCCL_FLOAT32,
            torch.float16: nccl.NCCL_FLOAT16,
            torch.bfloat16: NCCL_BFLOAT16,
        }

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `Broadcast`."""
        self._communicator.bcast(*self._memory(tensor), ROOT, self._stream(tensor))

    def add(self, tensor: torch.Tensor) -> None:
        """The tensor becomes the sum of those of all ranks."""
        address, count, kind = self._memory(tensor)
        self._communicator.allReduce(address, address, count, kind, self._sum, self._stream(tensor))

    def abort(self) -> None:
        """See `Broadcast`."""
        self._communicator.abort()

    def _memory(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        assert tensor.is_contiguous(), "NCCL reads memory as it lies"
        return tensor.data_ptr(), tensor.numel(), self._types[tensor.dtype]

    def _stream(self, tensor: torch.Tensor) -> int:
        return int(torch.cuda.current_stream(tensor.device).cuda_stream)
