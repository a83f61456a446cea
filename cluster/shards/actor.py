"""A shard of the head as a Ray actor: it keeps its rows while groups come and go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray

from actors.head.sharded.part import ShardPart
from cluster.collective.join import GroupPlan

# Calls that are answered while a group is served.
BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Where a shard runs, and how many tokens it owns."""

    node: str
    process_id: int
    tokens: int


class RemoteShard:
    """The actor. It is warm when it answers; `serve` blocks for as long as a group lasts."""

    def __init__(self, part: ShardPart) -> None:
        from actors.head.sharded.part import build_shard  # torch and numba load here

        self._part = part
        self._shard = build_shard(part)

    @ray.method(concurrency_group=BESIDE)
    def locate(self) -> ShardLocation:
        node = str(ray.get_runtime_context().get_node_id())
        return ShardLocation(node, os.getpid(), len(self._part.owned.ids))

    def serve(self, plan: GroupPlan, rank: int) -> None:
        """Takes part in the steps of the group of ``plan`` until the root has no more.

        Raises `actors.collective.CollectiveError` where another process has gone.
        """
        from actors.head.sharded.shard_server import ShardServer
        from actors.states.sequence_state import SequenceStates
        from cluster.collective.join import join

        part = self._part
        states = SequenceStates(part.owned.vocabulary_size, part.eos_ids, part.largest)
        ShardServer(self._shard, part.owned.ids, states, join(plan, rank)).run()


def start_shard_actor(part: Any, **options: Any) -> Any:
    """An actor for ``part``, which may be a reference into the object store. ``options`` are Ray's:
    where it runs and what it reserves."""
    chosen = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **options}
    remote = ray.remote(concurrency_groups={BESIDE: 1})
    return remote(RemoteShard).options(**chosen).remote(part)
