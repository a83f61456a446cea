"""A shard of the head as a Ray actor: it keeps its rows while groups come and go."""

from __future__ import annotations

import logging

import ray

from lexshard.actors.collective import CollectiveError
from lexshard.actors.head.sharded.part import ShardPart
from lexshard.actors.role import Place
from lexshard.cluster.collective.join import GroupPlan
from lexshard.cluster.roles.actor import place_in_cluster

# Calls that are answered while a group is served.
BESIDE = "beside"

logger = logging.getLogger("lexshard.shards")


class ShardActor:
    """The actor: a spare without a part, until it is given one. `serve` blocks for as long as a
    group lasts."""

    def __init__(self, part: ShardPart | None = None) -> None:
        from lexshard.actors.head.sharded import shard_server  # torch and numba load here

        assert shard_server
        if part is not None:
            self.take(part)

    def take(self, part: ShardPart) -> None:
        """Becomes the shard of ``part``."""
        from lexshard.actors.head.sharded.part import build_shard

        self._part = part
        self._shard = build_shard(part)

    def ready(self) -> Place:
        """Where it is, once it has its part and serves no group."""
        return place_in_cluster()

    @ray.method(concurrency_group=BESIDE)
    def place(self) -> Place:
        """Where it is, at once."""
        return place_in_cluster()

    def serve(self, plan: GroupPlan, rank: int) -> None:
        """Takes part in the steps of the group of ``plan`` until the root has no more, or another
        process has gone: the root, which notices, forms another group."""
        from lexshard.actors.head.sharded.shard_server import ShardServer
        from lexshard.actors.states.sequence_state import SequenceStates
        from lexshard.cluster.collective.join import join

        part = self._part
        states = SequenceStates(part.owned.vocabulary_size, part.eos_ids, part.largest)
        try:
            ShardServer(self._shard, part.owned.ids, states, join(plan, rank)).run()
        except CollectiveError as error:
            logger.info("group %s has ended: %s", plan.name, error)
