"""A shard of the head as a Ray actor: it keeps its rows while groups come and go."""

from __future__ import annotations

import logging
from typing import NamedTuple

import ray

from lexshard.actors.collective import CollectiveError
from lexshard.actors.head.sharded.part import ShardPart
from lexshard.actors.role import Place
from lexshard.cluster.collective.join import GroupPlan
from lexshard.cluster.roles.actor import place_in_cluster

# Calls that are answered while a group is served.
BESIDE = "beside"

logger = logging.getLogger("lexshard.shards")


class ShardPlace(NamedTuple):
    """Where a shard is, and on which GPU, if it is on one that NCCL can carry to
    (`cluster.collective.nccl_links.own_gpu`)."""

    place: Place
    gpu: str | None


class ShardActor:
    """The actor: a spare without a part, until it is given one. `serve` blocks for as long as a
    group lasts."""

    def __init__(self, part: ShardPart | None = None) -> None:
        from lexshard.actors.head.sharded import shard_server  # torch and numba load here
        from lexshard.kernels.cached_code import load_code_alone

        assert shard_server
        load_code_alone()
        if part is not None:
            self.take(part)

    def take(self, part: ShardPart) -> None:
        """Becomes the shard of ``part``."""
        import torch

        from lexshard.actors.head.sharded.part import build_shard

        self._part = part
        self._device = torch.device(part.device)
        self._take_device()
        self._shard = build_shard(part)

    def _take_device(self) -> None:
        """Where this process sees the GPUs of others, too. It holds for the calling thread alone,
        and Ray calls methods in others than that in which it makes an actor."""
        import torch

        if self._device.index is not None:
            torch.cuda.set_device(self._device)

    def ready(self) -> ShardPlace:
        """Where it is, once it has its part and serves no group."""
        from lexshard.cluster.collective.nccl_links import own_gpu

        return ShardPlace(place_in_cluster(), own_gpu(self._device))

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

        self._take_device()
        part = self._part
        states = SequenceStates(part.owned.vocabulary_size, part.eos_ids, part.largest)
        try:
            group = join(plan, rank, device=self._device)
            ShardServer(self._shard, part.owned.ids, states, group).run()
        except CollectiveError as error:
            logger.info("group %s has ended: %s", plan.name, error)
