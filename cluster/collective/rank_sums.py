"""Sums of the ranks of a parallel body (`actors.body.parallel.sums`): by gloo on CPUs, by NCCL on
GPUs."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import torch

from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.collective import CollectiveError
from lexshard.cluster.collective.gloo_links import GlooLinks
from lexshard.cluster.collective.watchdog import Watchdog

logger = logging.getLogger("lexshard.ranks")


class GlooSums:
    """Over ``links``, each wait for at most ``seconds``.

    In round r a rank and the one whose number differs in bit r swap what they have, and both add
    it: all have the same bits, which do not depend on how many rows there are.
    """

    def __init__(self, links: GlooLinks, seconds: float) -> None:
        self._links = links
        self._seconds = seconds

    def add(self, values: torch.Tensor) -> None:
        other = torch.empty_like(values)
        distance = 1
        try:
            while distance < self._links.size:
                partner = self._links.rank ^ distance
                sent = self._links.send(values, partner)
                self._links.receive(other, partner).wait(self._seconds)
                sent.wait(self._seconds)
                values += other
                distance *= 2
        except CollectiveError as error:
            raise RankLostError(str(error)) from error

    def complete(self) -> bool:
        return True  # each sum has waited


class DeviceGroup(Protocol):
    """A communicator of GPUs (`cluster.collective.nccl_links.CupyGroup`)."""

    def add(self, tensor: torch.Tensor) -> None: ...

    def abort(self) -> None: ...


class NcclSums:
    """By ``group`` in order of the current stream of the GPU, or in a graph that is recorded there.

    NCCL has no time-out: a step that is not complete within ``seconds`` ends the group, which ends
    what waits in it on the device. Its hidden states are not to be used then, and `complete` says
    so.
    """

    def __init__(self, group: DeviceGroup, seconds: float) -> None:
        self._group = group
        self._device: torch.device | None = None  # of what has been added
        self._lost = False
        self._watchdog = Watchdog(seconds, self._late)

    def add(self, values: torch.Tensor) -> None:
        if self._lost:
            raise RankLostError("this group of ranks has ended")
        self._device = values.device
        try:
            self._group.add(values)
        except RuntimeError as error:  # as cupy says what NCCL does
            raise RankLostError(f"NCCL: {error}") from error

    def complete(self) -> bool:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        done: list[bool] = []
        self._watchdog.expect("a step of several ranks", lambda: bool(done))
        event.synchronize()
        done.append(True)
        return not self._lost

    def abort(self) -> None:
        """Ends the group, from any thread. Doing so twice is harmless.

        NCCL ends what waits at once, and then waits itself until no recorded graph holds the
        group, which the next one has dropped: the caller does not wait for that.
        """
        if not self._lost:
            self._lost = True
            self._watchdog.close()
            threading.Thread(target=self._group.abort, name="nccl_abort", daemon=True).start()

    def _late(self, message: str) -> None:
        logger.warning("%s", message)
        self.abort()
