"""Samplers outside of the engine's process: what an engine is given to start them."""

from __future__ import annotations

from threading import Event

from lexshard.actors.configuration import SamplerPlacement
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle


def start_sampler(
    settings: SamplerSettings, placement: SamplerPlacement, closing: Event
) -> SamplerHandle:
    """A sampler that is ready for work, in a child process or as a Ray actor; see `RemoteSampler`
    for ``closing``."""
    if placement == "ray":
        from lexshard.cluster.samplers.actor import RemoteSampler

        return RemoteSampler(settings, closing)
    from lexshard.cluster.samplers.process import SamplerProcess

    return SamplerProcess(settings)
