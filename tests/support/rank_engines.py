"""Engines of the demo whose bodies several ranks share, children of this process."""

from __future__ import annotations

from functools import partial
from typing import Any

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.cluster.ranks.processes import RankProcesses
from lexshard.cluster.ranks.shards import RankShards
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.token_digest import LONGEST
from tests.support.paths import DEMO

STREAMS = 24


def engine_of(ranks: int | None, **changes: Any) -> Engine:
    """In bfloat16, as the demo is stored; ranks are children of this process, and have shards where
    there are as many."""
    settings = {"max_model_len": LONGEST, "threads": 1, "shard_seconds": 30, **changes}
    configuration = EngineConfiguration(str(DEMO), device="cpu", tensor_parallel=ranks, **settings)
    shards = RankShards(configuration) if configuration.shards_at_ranks else None
    return Engine(
        configuration,
        start_sampler,
        shard_starter=shards,
        start_ranks=partial(RankProcesses, seconds=30.0),
    )
