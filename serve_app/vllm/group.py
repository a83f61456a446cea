"""vLLM's tensor-parallel ranks as the processes of a sharded head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from vllm.distributed import get_tp_group

from lexshard.actors.collective import ROOT


class TensorParallelGroup:
    """The tensor-parallel ranks of this process (`actors.collective.Rounds`), by vLLM's own group
    for messages in memory; its time-outs hold."""

    def __init__(self) -> None:
        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    def broadcast(self, message: bytes | None = None, *, patient: bool = False) -> bytes:
        told: bytes = self._group.broadcast_object(message, src=ROOT)
        return told

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        largest = torch.tensor(values)
        operation, group = torch.distributed.ReduceOp.MAX, self._group.cpu_group
        torch.distributed.all_reduce(largest, operation, group)
        return largest.numpy()

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        found = [b""] * self.size if self.rank == ROOT else None
        first, group = self._group.first_rank, self._group.cpu_group
        torch.distributed.gather_object(message, found, first, group)
        return tuple(found or ())
