"""Engines of the demo whose bodies several ranks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lexshard.actors.body.parallel.loading import StartRanks
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.head.sharded.recovering_head import ShardStarter
from lexshard.cluster.ranks.processes import RankProcesses
from lexshard.cluster.ranks.shards import RankShards
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.token_digest import LONGEST
from tests.support.paths import DEMO

STREAMS = 24
CHILDREN = partial(RankProcesses, seconds=30.0)


def engine_of(
    ranks: int | None,
    start: StartRanks = CHILDREN,
    other_shards: Callable[[EngineConfiguration], ShardStarter] | None = None,
    **changes: Any,
) -> Engine:
    """In bfloat16, as the demo is stored; ranks are children of this process where ``start`` makes
    no others, and have shards where there are as many. Others are made by ``other_shards``."""
    settings = {"max_model_len": LONGEST, "threads": 1, "shard_seconds": 30, **changes}
    configuration = EngineConfiguration(str(DEMO), device="cpu", tensor_parallel=ranks, **settings)
    shards = RankShards if configuration.shards_at_ranks else other_shards
    return Engine(
        configuration,
        start_sampler,
        shard_starter=shards and shards(configuration),
        start_ranks=start,
    )
