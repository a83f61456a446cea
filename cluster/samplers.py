"""Samplers outside of the engine's process: what an engine is given to start them."""

from __future__ import annotations

from actors.configuration import SamplerPlacement
from actors.decision_messages import SamplerSettings
from actors.decision_plane import SamplerHandle


def start_sampler(settings: SamplerSettings, placement: SamplerPlacement) -> SamplerHandle:
    """A sampler that is ready for work, in a child process or as a Ray actor."""
    if placement == "ray":
        from cluster.sampler_actor import SamplerActor

        return SamplerActor(settings)
    from cluster.sampler_process import SamplerProcess

    return SamplerProcess(settings)
