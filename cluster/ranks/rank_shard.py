"""The shard of the head that a rank has: it is asked over the link by which the rank is told what
to compute, between two steps of the body."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from lexshard.actors.body.parallel.messages import (
    GroupMember,
    RankMessage,
    RankPart,
    RankRefusal,
    ServeShard,
    ShardMessage,
    decode_rank_message,
)
from lexshard.actors.collective import ROOT, CollectiveError, CollectiveLostError
from lexshard.actors.packed_arrays import encode
from lexshard.cluster.link import Link

if TYPE_CHECKING:
    from lexshard.actors.head.sharded.part import ShardPart
    from lexshard.actors.head.sharded.rounds import AnyShard
    from lexshard.actors.head.sharded.shard_server import ShardServer


class RankShard:
    """None until the rank of ``part`` is told of one over ``link``; ``hidden`` are the hidden
    states of the body's last step."""

    def __init__(self, link: Link, part: RankPart) -> None:
        self.hidden: torch.Tensor | None = None
        self._link = link
        self._part = part
        self._kept: RankMessage | None = None  # what comes next, if it is known already
        self._own: tuple[ShardPart, AnyShard] | None = None
        self._server: ShardServer | None = None

    def next(self) -> RankMessage:
        """What the rank is told next."""
        kept, self._kept = self._kept, None
        return decode_rank_message(self._link.receive()) if kept is None else kept

    def serve(self, told: ServeShard) -> None:
        """Joins a new group, with the shard that was ``told``, if it is not the same."""
        from lexshard.actors.head.sharded.part import build_shard
        from lexshard.actors.head.sharded.rank_part import read_part
        from lexshard.actors.head.sharded.shard_server import ShardServer
        from lexshard.actors.states.sequence_state import SequenceStates
        from lexshard.cluster.ranks.shard_group import RankCollective, ShardLinks

        if told.part:
            try:
                part = read_part(told.part, self._part)
                self._own = part, build_shard(part)
            except (OSError, ValueError, KeyError, MemoryError, RuntimeError) as error:
                self._link.send(encode(RankRefusal(f"{type(error).__name__}: {error}")))
                return
        assert self._own is not None, "the first of its groups brought a shard"
        part, shard = self._own
        self._link.send(encode(GroupMember(told.question)))
        states = SequenceStates(part.owned.vocabulary_size, part.eos_ids, part.largest)
        links = ShardLinks(self._part.rank, self._part.ranks, lambda rank: self._link, self._hear)
        # However long the root takes: that it has gone, or begins anew, is told by the link.
        group = RankCollective(links, inf, lambda: self.hidden)
        self._server = ShardServer(shard, part.owned.ids, states, group)

    def follow(self, message: ShardMessage) -> None:
        """Takes part in the step that ``message`` begins, until it ends or is given up."""
        assert self._server is not None, "it has introduced itself"
        self._kept = message
        try:
            self._server.follow()
        except CollectiveError:
            return  # what it is told instead comes next

    def _hear(self, rank: int, seconds: float) -> bytes:
        message = self.next()
        if not isinstance(message, ShardMessage):
            self._kept = message
            raise CollectiveLostError("the root begins anew", ROOT)
        return message.content
