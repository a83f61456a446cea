"""A computation on fixed memory, recorded once and replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch


class Capture(Protocol):
    """Records what ``compute`` launches, which reads and writes fixed memory only."""

    def __call__(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        """What ``compute`` returned, whose memory every replay fills anew, and what replays it.

        Raises RuntimeError for what cannot be recorded: above all a wait for the device.
        """
        ...


class CudaCapture:
    """CUDA graphs, which share the memory of what they compute on the way: one replays at a time.

    That memory ends with the last of them: new ones then take a new `CudaCapture`.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        current = torch.cuda.current_stream()
        aside = _aside(current.device_index)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            compute()  # compiles, and opens libraries, which a capture must not see
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # The head may be using the device from another thread.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"
        ):
            result = compute()
        return result, graph.replay


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Where whatever is recorded runs first: one stream, for cuBLAS keeps tens of megabytes for
    every stream that it has seen."""
    return torch.cuda.Stream(device)


def compute_each_time(
    compute: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, Callable[[], object]]:
    """A `Capture` that records nothing: a replay computes again."""
    result = compute()

    def again() -> None:
        with torch.inference_mode():  # in which the result was made
            result.copy_(compute())

    return result, again
