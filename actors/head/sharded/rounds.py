"""Which rounds the shards of a head take, by what they are: both sides must agree on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import Collective
from lexshard.actors.head.exchange import MassShard
from lexshard.actors.head.output_head import Hidden
from lexshard.actors.head.paper.clusters import ClusterTokens
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.sharded.announcements import Introduction
from lexshard.actors.head.sharded.cluster_step import ClusterStep
from lexshard.actors.head.sharded.step import AgreedScreening, ShardStep
from lexshard.actors.states.row_table import RowTable

AnyShard = MassShard | PaperHead


class Rounds(Protocol):
    """The steps of one shard in a group."""

    def screen(self, hidden: Hidden, rows: RowTable) -> AgreedScreening:
        """The first half of a step, which every process of the group takes."""
        ...

    def rescore(self, screening: AgreedScreening) -> Candidates | None:
        """The second half: the candidates of all shards at the root, None elsewhere."""
        ...


def introduce(shard: AnyShard, owned_ids: npt.NDArray[np.int32]) -> Introduction:
    """What ``shard``, which owns ``owned_ids``, says of itself."""
    if isinstance(shard, PaperHead):
        ids, offsets = shard.tokens.ids, shard.tokens.offsets
        return Introduction(shard.vocabulary_size, ids.tobytes(), offsets.tobytes())
    return Introduction(shard.vocabulary_size, owned_ids.astype(np.int32).tobytes())


def rounds_of(
    shard: AnyShard, introductions: Sequence[Introduction], collective: Collective
) -> Rounds:
    """The steps of ``shard``, with its own introduction first and at the root those of all others.

    Raises ValueError for a group of different kinds of shards.
    """
    if len({bool(each.clusters) for each in introductions}) > 1:
        raise ValueError("shards of one head have clusters all or none: give all the same --head")
    if isinstance(shard, PaperHead):
        tokens = [
            ClusterTokens(each.ids, np.frombuffer(each.clusters, np.int64))
            for each in introductions
        ]
        return ClusterStep(shard, tokens, collective)
    return ShardStep(shard, [each.ids for each in introductions], collective)
