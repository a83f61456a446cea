"""Shards of the head at the ranks of a body, as the engine's process sees them.

A rank that is lost is lost to both. Where the body misses it first, the head finds another process
in its place; where the head does, it has the body form a new group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lexshard.actors.body.batch import Body
from lexshard.actors.body.parallel.messages import ServeShard, ShardMessage
from lexshard.actors.body.parallel.parallel_body import ParallelBody
from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.collective import ROOT, Collective, CollectiveLostError
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.part import ShardPart
from lexshard.actors.head.sharded.rank_part import pack_part
from lexshard.actors.packed_arrays import encode
from lexshard.actors.role import RunningRole
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.ranks.gang import RankGang, RankHandle
from lexshard.cluster.ranks.shard_group import RankCollective, ShardLinks
from lexshard.cluster.topology.configured import configured_assignment

START_SECONDS = 600.0  # to read rows, quantise them and time screens


class ShardsOfRanks:
    """Those of ``parts`` at the ranks of ``body`` from 1 on
    (`actors.head.sharded.recovering_head.Gang`). ``seconds`` is how long one may keep a step
    waiting."""

    def __init__(self, parts: Sequence[ShardPart], body: ParallelBody, seconds: float) -> None:
        assert isinstance(body.others, RankGang), "ranks here have no process"
        self._body = body
        self._ranks: RankGang = body.others
        self._packed = [pack_part(part) for part in parts]
        self._said = [f"{len(part.owned.ids)} tokens" for part in parts]
        self._seconds = seconds
        self._asked: tuple[RankHandle, ...] = ()  # to be the last group
        self._served: tuple[RankHandle, ...] = ()  # those that have their shard

    def form(self) -> Collective:
        """See `Gang`. A rank that has its shard already keeps it."""
        ranks = self._ranks
        try:
            if self._asked == ranks.members:  # the body has missed none of them
                self._body.form_anew(RankLostError("a shard did not do its part of a step"))
            self._asked, question = ranks.members, ranks.question()
            for member, packed in zip(self._asked, self._packed, strict=True):
                part = b"" if member in self._served else packed
                member.link.send(encode(ServeShard(part, question)))
            for number in range(len(self._asked)):
                ranks.answer(number, question, START_SECONDS)
        except (PeerLostError, RankLostError) as error:
            raise CollectiveLostError(str(error)) from error
        self._served = self._asked
        links = ShardLinks(ROOT, 1 + len(self._asked), self._link_to, self._hear)
        return RankCollective(links, self._seconds, lambda: self._body.hidden)

    def roles(self) -> list[RunningRole]:
        """The shards but for the root's own."""
        return [
            replace(role, name="shard", detail=said)
            for role, said in zip(self._ranks.roles(), self._said, strict=True)
        ]

    def close(self) -> None:
        """The ranks end with their body."""

    def _link_to(self, rank: int) -> Link:
        if self._asked != self._ranks.members:
            raise CollectiveLostError("a rank was lost, and its shard with it")
        return self._asked[rank - 1].link

    def _hear(self, rank: int, seconds: float) -> bytes:
        said = self._ranks.hear(rank - 1, seconds)
        assert isinstance(said, ShardMessage), "it was asked for nothing else"
        return said.content


@dataclass(frozen=True, slots=True)
class RankShards:
    """The shards that ``configuration`` asks for, at the ranks of the engine's body
    (`actors.head.sharded.recovering_head.ShardStarter`)."""

    configuration: EngineConfiguration

    def assign(self, vocabulary_size: int) -> list[OwnedRows]:
        return list(configured_assignment(self.configuration, vocabulary_size).owned)

    def start(self, parts: Sequence[ShardPart], body: Body) -> ShardsOfRanks:
        assert isinstance(body, ParallelBody), "others have no ranks"
        return ShardsOfRanks(parts, body, float(self.configuration.shard_seconds))
