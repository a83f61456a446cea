"""Which rounds the shards of a head take, by what they are: both sides must agree on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.actors.collective import Collective
from lexshard.actors.head.exchange import AnyMassShard
from lexshard.actors.head.paper.clusters import ClusterTokens
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.sharded.announcements import Introduction
from lexshard.actors.head.sharded.cluster_step import ClusterStep
from lexshard.actors.head.sharded.step import ShardStep

AnyShard = AnyMassShard | PaperHead


def introduce(shard: AnyShard, owned_ids: npt.NDArray[np.int32]) -> Introduction:
    """What ``shard``, which owns ``owned_ids``, says of itself."""
    if isinstance(shard, PaperHead):
        return Introduction(shard.vocabulary_size, shard.tokens.ids, shard.tokens.offsets)
    return Introduction(
        shard.vocabulary_size, owned_ids.astype(np.int32), asks_others=shard.asks_others
    )


def rounds_of(
    shard: AnyShard, introductions: Sequence[Introduction], collective: Collective
) -> ShardStep | ClusterStep:
    """The steps of ``shard``, with its own introduction first and at the root those of all others.

    Raises ValueError for a group of different kinds of shards.
    """
    clusters = [
        ClusterTokens(each.ids, each.offsets) for each in introductions if each.offsets is not None
    ]
    if clusters and len(clusters) < len(introductions):
        raise ValueError("shards of one head have clusters all or none: give all the same --head")
    if len({each.asks_others for each in introductions}) > 1:
        raise ValueError("shards of one head are all on GPUs or none: give all the same --device")
    if isinstance(shard, PaperHead):
        return ClusterStep(shard, clusters, collective)
    return ShardStep(shard, [each.ids for each in introductions], collective)
