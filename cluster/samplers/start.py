"""Samplers outside of the engine's process: what an engine is given to start them."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

from lexshard.actors.configuration import SamplerPlacement
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle

if TYPE_CHECKING:
    from lexshard.cluster.topology.reservation import Reservation, Slot


class SamplerStarter:
    """Starts samplers in child processes or as Ray actors: those of a gang in the slots of its
    ``reservation``, where the successor of a lost one has its slot. Threads may use it at once."""

    def __init__(self, reservation: Reservation | None = None) -> None:
        self._reservation = reservation
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in () if reservation is None else reservation.samplers:
            self._free.put(slot)

    def __call__(
        self, settings: SamplerSettings, placement: SamplerPlacement, closing: Event
    ) -> SamplerHandle:
        """A sampler that is ready for work; see `RemoteSampler` for ``closing``.

        Raises `actors.decision.plane.SamplerLostError` where it dies before it is ready.
        """
        if placement != "ray":
            from lexshard.cluster.samplers.process import SamplerProcess

            return SamplerProcess(settings)
        from lexshard.cluster.samplers.actor import RemoteSampler

        if self._reservation is None:
            return RemoteSampler(settings, closing)
        slot = self._free.get()
        give_back = partial(self._free.put, slot)
        try:
            return RemoteSampler(settings, closing, give_back, **slot)
        except BaseException:
            give_back()
            raise


start_sampler = SamplerStarter()
