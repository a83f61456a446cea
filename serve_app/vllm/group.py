"""vLLM's tensor-parallel ranks as the processes of a sharded head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group

from lexshard.actors.collective import ROOT

FRAME = 4096  # bytes that are exchanged at once, and nearly always hold a whole message
SIZE = 8  # of them say how long it is


class TensorParallelGroup:
    """The tensor-parallel ranks of this process (`actors.collective.Rounds`), by the group that
    vLLM gathers its logits with, and its time-outs."""

    def __init__(self) -> None:
        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    def broadcast(self, message: bytes | None = None, *, patient: bool = False) -> bytes:
        told: bytes = self._group.broadcast_object(message, src=ROOT)
        return told

    def all_reduce_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        every = [np.frombuffer(each) for each in self._gathered(values.tobytes())]
        largest: npt.NDArray[np.float64] = np.max(every, axis=0)
        return largest

    def gather(self, message: bytes) -> tuple[bytes, ...]:
        own = len(message).to_bytes(SIZE, "little") + message
        frames = self._gathered(own[:FRAME].ljust(FRAME, b"\0"))
        sizes = [SIZE + int.from_bytes(frame[:SIZE], "little") for frame in frames]
        if max(sizes) > FRAME:
            frames = self._gathered(own.ljust(-(-max(sizes) // SIZE) * SIZE, b"\0"))
        parts = zip(frames, sizes, strict=True)
        return tuple(frame[SIZE:size] for frame, size in parts) if self.rank == ROOT else ()

    def _gathered(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, each as long as this one, a multiple of 8 bytes."""
        # As numbers of a type that every group of vLLM's gathers; it does not look at them.
        own = torch.frombuffer(bytearray(message), dtype=torch.float32).to(self._group.device)
        every = self._group.all_gather(own, dim=0).cpu().numpy().tobytes()
        return [every[i : i + len(message)] for i in range(0, len(every), len(message))]
