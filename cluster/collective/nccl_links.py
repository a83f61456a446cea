"""Hidden states from GPU to GPU by NCCL, called through cupy.

NCCL refuses two ranks on one device, has no time-out and cannot be interrupted: a `Watchdog` ends
the process where a broadcast does not complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch.distributed import Store

from lexshard.actors.collective import ROOT
from lexshard.cluster.collective.watchdog import Watchdog, end_process

# Fills a tensor with the root's, in order of the current stream.
Broadcast = Callable[[torch.Tensor], None]


class NcclLinks:
    """Broadcasts of tensors on ``device``, watched. ``connect`` gives the broadcast
    (`cupy_broadcast`); it is called here, and once more for nothing, so that no step waits for
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
        with torch.cuda.device(device):
            self._broadcast = connect()
            self._broadcast(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
        formed.append(True)
        forming.close()
        self._watchdog = Watchdog(seconds, bite)

    def broadcast(self, hidden: torch.Tensor) -> None:
        started: list[torch.cuda.Event] = []
        # The call itself may hang as well.
        self._watchdog.expect(
            "broadcast of hidden states by NCCL", lambda: bool(started) and started[0].query()
        )
        self._broadcast(hidden)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        started.append(event)

    def close(self) -> None:
        self._watchdog.close()


def cupy_broadcast(store: Store, name: str, rank: int, size: int) -> Broadcast:
    """NCCL's broadcast through cupy, in a communicator of its own whose identity the root leaves in
    ``store`` under ``name``. The tensors are fp32; the current stream's order is kept."""
    from cupy.cuda import nccl  # finds the library that torch has loaded

    if rank == ROOT:
        store.set(name, json.dumps(nccl.get_unique_id()))
    communicator = nccl.NcclCommunicator(size, tuple(json.loads(store.get(name))), rank)

    def broadcast(tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
        communicator.bcast(tensor.data_ptr(), tensor.numel(), nccl.NCCL_FLOAT32, ROOT, stream)

    return broadcast
