"""The shard actors of one head: started, joined to groups, replaced when they are lost."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.collective import Collective, CollectiveLostError
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.part import ShardPart
from lexshard.actors.role import RunningRole
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.cluster.collective.nccl_links import is_each_apart, own_gpu
from lexshard.cluster.link import PeerLostError
from lexshard.cluster.roles.actor import answer_of, start_actor
from lexshard.cluster.shards.actor import BESIDE, ShardActor, ShardPlace
from lexshard.cluster.topology.configured import configured_assignment
from lexshard.cluster.topology.reservation import Reservation

# After so long one is lost that does not answer, a spare that loads, a shard that starts.
ANSWER_SECONDS, LOADING_SECONDS, START_SECONDS = 1.0, 30.0, 600.0
NCCL_FORMING_SECONDS = 60.0
# Until Ray has noticed that a node is lost, it may send the replacement of what was lost there.
NODE_LOSS_SECONDS, PAUSE_SECONDS = 30.0, 0.5

logger = logging.getLogger("lexshard.shards")


class ShardGang:
    """An actor for each of ``parts``, and ``spares`` that wait to become the shard of one that is
    lost; the caller is the root of their groups. ``seconds`` is how long a shard may keep a step
    waiting. They run where ``reservation`` says, and without one anywhere, reserving nothing.

    Returns when all are warm. Raises `CollectiveLostError`, with the reason, where one cannot be
    started.
    """

    def __init__(
        self,
        parts: Sequence[ShardPart],
        *,
        seconds: float,
        spares: int = 0,
        reservation: Reservation | None = None,
    ) -> None:
        if reservation is None:
            parts = on_devices_apart(parts, torch.cuda.device_count())
        nowhere: list[Mapping[str, Any]] = [{}]
        self._options = list(reservation.shards) if reservation else len(parts) * nowhere
        self._parts = [ray.put(part) for part in parts]  # for later ones, too
        self._said = [(part.device, f"{len(part.owned.ids)} tokens") for part in parts]
        self._device = torch.device(parts[0].device).type  # the root's is of the same kind
        self._seconds = seconds
        self._host = ray.util.get_node_ip_address()  # where they reach the root
        self._groups = 0
        self._store = open_store(self._host, 0, START_SECONDS, root=True)
        self._actors: list[Any] = [
            _start(options, part) for part, options in zip(self._parts, self._options, strict=True)
        ]
        self._spares = list(map(_Spare, reservation.spares if reservation else spares * nowhere))
        try:
            self._places = [self._place(rank) for rank in range(1, self._size)]
        except BaseException:
            self.close()
            raise

    def form(self) -> Collective:
        """See `actors.head.sharded.recovering_head.Gang`."""
        if self._groups:
            self._replace_the_lost()
        self._groups += 1
        root = torch.device(self._device)
        gpus = [own_gpu(root), *(each.gpu for each in self._places)]
        nccl = is_each_apart(gpus)
        # NCCL looks at the machine first.
        forming = NCCL_FORMING_SECONDS if nccl else ANSWER_SECONDS
        plan = GroupPlan(
            name=f"shards-{os.getpid()}-{self._groups}",
            size=self._size,
            host=self._host,
            port=self._store.port,
            seconds=self._seconds,
            forming_seconds=max(self._seconds, forming),
            nccl=nccl,
        )
        for rank, actor in enumerate(self._actors, 1):
            actor.serve.remote(plan, rank)
        return join(plan, 0, store=self._store, device=root)

    def roles(self) -> list[RunningRole]:
        """The shards but for the root's own."""
        return [
            RunningRole("shard", rank, found.place, *said)
            for rank, (found, said) in enumerate(zip(self._places, self._said, strict=True), 1)
        ]

    def close(self) -> None:
        """Ends every actor. Closing twice is harmless."""
        for actor in (*self._actors, *(spare.actor for spare in self._spares)):
            ray.kill(actor)
        self._actors, self._spares = [], []

    @property
    def _size(self) -> int:
        return len(self._parts) + 1

    def _replace_the_lost(self) -> None:
        lost = [rank for rank, actor in enumerate(self._actors, 1) if not _answers(actor)]
        for rank in lost:
            logger.warning("shard %d of %d does not answer and is replaced", rank, self._size)
            ray.kill(self._actors[rank - 1])
            self._actors[rank - 1] = self._replacement(rank)
        deadline = time.monotonic() + NODE_LOSS_SECONDS
        for rank in lost:
            self._places[rank - 1] = self._place_again(rank, deadline)

    def _place_again(self, rank: int, deadline: float) -> ShardPlace:
        """Where the replacement is, which is replaced itself if it was lost before it began."""
        while True:
            try:
                return self._place(rank)
            except CollectiveLostError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_SECONDS)
            ray.kill(self._actors[rank - 1])
            self._actors[rank - 1] = _start(self._options[rank - 1], self._parts[rank - 1])

    def _replacement(self, rank: int) -> Any:
        """The first spare that answers, where there is one. The places of those that were asked are
        others' then: what does not answer is lost, too."""
        part, left = self._parts[rank - 1], self._options[rank - 1]
        for _ in range(len(self._spares)):
            spare = self._spares.pop(0)
            if spare.answers():
                self._spares.append(_Spare(left))
                self._options[rank - 1] = spare.options
                spare.actor.take.remote(part)
                return spare.actor
            ray.kill(spare.actor)
            self._spares.append(_Spare(spare.options))
        return _start(left, part)

    def _place(self, rank: int) -> ShardPlace:
        try:
            place: ShardPlace = answer_of(self._actors[rank - 1].ready.remote(), START_SECONDS)
        except (PeerLostError, TimeoutError) as error:
            reason = f"shard {rank} could not be started: {error}"
            raise CollectiveLostError(reason, rank) from error
        return place


def on_devices_apart(parts: Sequence[ShardPart], count: int) -> list[ShardPart]:
    """The parts on the ``count`` GPUs of a machine, each on another as far as there are enough, the
    root's being the first. Where Ray gives GPUs away, a process sees its own alone."""
    return [
        part if part.device == "cpu" else replace(part, device=f"cuda:{rank % count}")
        for rank, part in enumerate(parts, 1)
    ]


class _Spare:
    """An actor without a part, started with these ``options``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.actor = options, _start(options)
        self._loaded = self.actor.place.remote()

    def answers(self) -> bool:
        ray.wait([self._loaded], timeout=LOADING_SECONDS)
        return _answers(self.actor)


def _answers(actor: Any) -> bool:
    try:
        answer_of(actor.place.remote(), ANSWER_SECONDS)
    except (PeerLostError, TimeoutError):
        return False
    return True


def _start(options: Mapping[str, Any], part: Any = None) -> Any:
    """An actor for ``part``, a reference into Ray's object store; None: a spare."""
    return start_actor(ShardActor, part, beside=[BESIDE], **options)


@dataclass(frozen=True, slots=True)
class RayShards:
    """The shards that ``configuration`` asks for, as an engine starts them
    (`actors.head.sharded.recovering_head.ShardStarter`), where ``reservation`` says."""

    configuration: EngineConfiguration
    reservation: Reservation | None = None

    def assign(self, vocabulary_size: int) -> list[OwnedRows]:
        return list(configured_assignment(self.configuration, vocabulary_size).owned)

    def start(self, parts: Sequence[ShardPart], body: Body) -> ShardGang:
        return ShardGang(
            parts,
            seconds=float(self.configuration.shard_seconds),
            spares=self.configuration.shard_spares,
            reservation=self.reservation,
        )
