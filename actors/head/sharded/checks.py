"""Early refusals of settings of the output head that have no effect together."""

from __future__ import annotations

from lexshard.actors.configuration import EngineConfiguration


def check_shards(configuration: EngineConfiguration) -> None:
    """Raises ValueError. Of what `EngineConfiguration` describes, nothing is loaded for it."""
    if configuration.shards == 1 and configuration.shard_spares:
        raise ValueError(
            "--shard-spares replace shards in processes of their own, and with one shard there are "
            "none: leave it out, or add --shards 2"
        )
