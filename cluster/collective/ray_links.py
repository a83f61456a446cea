"""Links by `ray.util.collective`'s GLOO group, inside actors.

Ray's group has no time-outs: ``gloo_timeout`` bounds the meeting alone, and an operation waits for
what torch's default group waits for. So the default group is made here, without a limit, Ray's
adopts it, and operations run in a thread of their own whose caller stops waiting in time. What has
not come back by then cannot be called back: a process whose links have failed is to end.

One process has one such group in its life. `cluster.collective.gloo_links` is the plain way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed
from ray.util import collective
from torch.distributed import Store

from lexshard.actors.collective import ROOT, CollectiveLostError, CollectiveTimeoutError
from lexshard.cluster.collective.nccl_links import Broadcast

GROUP = "default"  # Ray's name for the group that adopts torch's
_FOREVER = timedelta(days=3650)


class RayLinks:
    """Process ``rank`` of ``size`` that meet at ``store`` (`gloo_links.open_store`); Ray runs it.

    Raises `CollectiveTimeoutError` where they are not connected within ``forming_seconds``.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, forming_seconds: float = 60.0
    ) -> None:
        self.rank = rank
        self.size = size
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._operate, name="collective", daemon=True).start()

        def form() -> None:
            torch.distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=_FOREVER
            )
            collective.init_collective_group(size, rank, backend="GLOO", group_name=GROUP)

        RayTransfer(self._submit(form), None).wait(forming_seconds)

    def send(self, data: torch.Tensor, rank: int) -> RayTransfer:
        return RayTransfer(self._submit(lambda: collective.send(data, rank, GROUP)), rank)

    def receive(self, into: torch.Tensor, rank: int) -> RayTransfer:
        return RayTransfer(self._submit(lambda: collective.recv(into, rank, GROUP)), rank)

    def close(self) -> None:
        if collective.is_group_initialized(GROUP):
            collective.destroy_collective_group(GROUP)
        self._work.put(None)

    def _submit(self, operation: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._work.put((operation, future))
        return future

    def _operate(self) -> None:
        while (work := self._work.get()) is not None:
            operation, future = work
            try:
                operation()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)


class RayTransfer:
    """An operation with process ``rank``, under way in the thread of its links."""

    __slots__ = ("_future", "_rank")

    def __init__(self, future: Future[None], rank: int | None) -> None:
        self._future = future
        self._rank = rank

    def wait(self, seconds: float | None) -> None:
        who = "a process" if self._rank is None else f"rank {self._rank}"
        try:
            self._future.result(seconds)
        except TimeoutError as error:
            raise CollectiveTimeoutError(
                f"{who} did not do its part within {seconds:g} s", self._rank
            ) from error
        except RuntimeError as error:
            raise CollectiveLostError(f"{who} has gone: {error}", self._rank) from error


def ray_nccl(name: str, rank: int, size: int) -> Broadcast:
    """`ray.util.collective`'s NCCL (it needs cupy), inside an actor that Ray gave a GPU."""
    collective.init_collective_group(size, rank, backend="NCCL", group_name=name)

    def broadcast(tensor: torch.Tensor) -> None:
        # Ray's NCCL has a stream of its own that neither waits for torch's nor is waited for.
        torch.cuda.synchronize(tensor.device)
        collective.broadcast(tensor, src_rank=ROOT, group_name=name)
        torch.cuda.synchronize(tensor.device)

    return broadcast
