"""Hidden states from GPU to GPU by NCCL: torch's, or Ray's (`ray_links.ray_nccl`).

NCCL refuses two ranks on one device, has no time-out and cannot be interrupted: a `Watchdog` ends
the process where a broadcast does not complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, Store

from lexshard.actors.collective import ROOT
from lexshard.cluster.collective.watchdog import Watchdog, end_process

# Fills a tensor with the root's, in order of the current stream.
Broadcast = Callable[[torch.Tensor], None]


class NcclLinks:
    """``broadcast`` of tensors on ``device``, watched: see `torch_nccl` and `ray_links.ray_nccl`.

    The first broadcast makes the communicator; it is done here, so that no step waits for it.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        device: torch.device,
        seconds: float,
        forming_seconds: float = 60.0,
        bite: Callable[[str], None] = end_process,
    ) -> None:
        self.device = device
        self._broadcast = broadcast
        forming = Watchdog(forming_seconds, bite)
        formed: list[bool] = []
        forming.expect("forming the NCCL group", lambda: bool(formed))
        broadcast(torch.zeros(1, device=device))
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


def torch_nccl(store: Store, name: str, rank: int, size: int) -> Broadcast:
    """torch's NCCL, of a group of its own that meets at ``store``."""
    from torch.distributed import ProcessGroupNCCL  # only where torch was built with CUDA

    meeting = PrefixStore(name, store)
    group: Any = ProcessGroupNCCL(meeting, rank, size, ProcessGroupNCCL.Options())
    options = BroadcastOptions()
    options.rootRank = ROOT

    def broadcast(tensor: torch.Tensor) -> None:
        group.broadcast([tensor], options).wait()  # of the stream, not for the result

    return broadcast
