"""The shard actors of one head: started, joined to groups, replaced when they are lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from actors.collective import Collective, CollectiveLostError
from actors.head.sharded.part import ShardPart
from cluster.collective.gloo_links import open_store
from cluster.collective.join import GroupPlan, join
from cluster.shards.actor import ShardLocation, start_shard_actor

# A shard that does not answer for so long is killed; one that starts has as long as a model takes.
ANSWER_SECONDS, START_SECONDS = 1.0, 600.0

logger = logging.getLogger("lexshard.shards")


class ShardGang:
    """An actor for each of ``parts``; the caller is the root of their groups, on ``host``, where
    they reach it. ``seconds`` is how long a shard may keep a step waiting.

    Returns when all are warm. Raises `CollectiveLostError`, with the reason, where one cannot be
    started.
    """

    def __init__(
        self, parts: Sequence[ShardPart], *, seconds: float, host: str | None = None
    ) -> None:
        self._parts = [ray.put(part) for part in parts]  # for those who come later, too
        self._seconds = seconds
        self._host = host or ray.util.get_node_ip_address()
        self._groups = 0
        self._store = open_store(self._host, 0, START_SECONDS, root=True)
        self._actors: list[Any] = [start_shard_actor(part) for part in self._parts]
        try:
            self.locations = [self._location(rank) for rank in range(1, self._size)]
        except BaseException:
            self.close()
            raise

    def form(self) -> Collective:
        """See `actors.head.sharded.recovering_head.Gang`."""
        if self._groups:
            self._replace_the_lost()
        self._groups += 1
        plan = GroupPlan(
            name=f"shards-{os.getpid()}-{self._groups}",
            size=self._size,
            host=self._host,
            port=self._store.port,
            seconds=self._seconds,
            forming_seconds=max(self._seconds, ANSWER_SECONDS),
        )
        for rank, actor in enumerate(self._actors, 1):
            actor.serve.remote(plan, rank)
        return join(plan, 0, store=self._store)

    def close(self) -> None:
        """Ends every actor. Closing twice is harmless."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    @property
    def _size(self) -> int:
        return len(self._parts) + 1

    def _replace_the_lost(self) -> None:
        lost = [rank for rank in range(1, self._size) if not self._answers(rank)]
        for rank in lost:
            logger.warning("shard %d of %d does not answer: another one starts", rank, self._size)
            ray.kill(self._actors[rank - 1])
            self._actors[rank - 1] = start_shard_actor(self._parts[rank - 1])
        for rank in lost:
            self.locations[rank - 1] = self._location(rank)

    def _answers(self, rank: int) -> bool:
        try:
            ray.get(self._actors[rank - 1].locate.remote(), timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False
        return True

    def _location(self, rank: int) -> ShardLocation:
        try:
            found: ShardLocation = ray.get(
                self._actors[rank - 1].locate.remote(), timeout=START_SECONDS
            )
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise CollectiveLostError(
                f"shard {rank} could not be started: {error}", rank
            ) from error
        return found
