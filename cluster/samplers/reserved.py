"""Sampler actors in the slots that a gang has reserved for them."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Event
from typing import Any

from lexshard.actors.configuration import SamplerPlacement
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle
from lexshard.cluster.samplers.actor import RemoteSampler
from lexshard.cluster.samplers.start import start_sampler
from lexshard.cluster.topology.reservation import Reservation, Slot


class ReservedSampler(RemoteSampler):
    """A `RemoteSampler` in ``slot``, which goes back to ``free`` when it is closed."""

    def __init__(
        self,
        settings: SamplerSettings,
        closing: Event,
        slot: Slot,
        free: SimpleQueue[Slot],
        **options: Any,
    ) -> None:
        super().__init__(settings, closing, **options)
        self._slot: Slot | None = slot
        self._free = free

    def close(self) -> None:
        super().close()
        slot, self._slot = self._slot, None
        if slot is not None:
            self._free.put(slot)


class ReservedSamplers:
    """`start_sampler` for a gang: its actors run where ``reservation`` says, and the successor of
    a lost one has its slot. Threads may start samplers at once."""

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in reservation.samplers:
            self._free.put(slot)

    def __call__(
        self, settings: SamplerSettings, placement: SamplerPlacement, closing: Event
    ) -> SamplerHandle:
        """Raises `actors.decision.plane.SamplerLostError` where it dies before it is ready."""
        if placement != "ray":
            return start_sampler(settings, placement, closing)
        slot = self._free.get()
        try:
            options = self._reservation.options(slot)
            return ReservedSampler(settings, closing, slot, self._free, **options)
        except BaseException:
            self._free.put(slot)
            raise
