"""A rank elsewhere: it replays what the first rank is asked for, until there is no more."""

from __future__ import annotations

from typing import Protocol

from lexshard.actors.body.parallel.messages import (
    AllocateCache,
    ComputeBatch,
    FormGroup,
    GroupMember,
    MeasureMemory,
    MeetGroup,
    MemoryLeft,
    RankPart,
    RankRefusal,
    RecordGraphs,
    ServeShard,
    ShardMessage,
)
from lexshard.actors.body.parallel.sums import RankGroup
from lexshard.actors.packed_arrays import encode
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.ranks.rank_shard import RankShard

NOT_MET = ("", 0)  # the place that a rank gives which has not met the others


class Meeting(Protocol):
    """How a rank comes together with the others."""

    def form(self) -> tuple[str, int] | None:
        """Leaves the group there was; where this rank listens for the next one, if it does."""

    def meet(self, told: MeetGroup) -> None:
        """Connects to the others where memory is not shared."""

    def leave(self) -> None:
        """The group is of no use any more: peers that wait in it stop waiting."""

    @property
    def exchange(self) -> RankGroup:
        """Of the group that was formed last."""


def serve_rank(link: Link, part: RankPart, meeting: Meeting) -> None:
    """Makes the rank of ``part`` and does what comes over ``link``; returns when that has ended, or
    when the rank cannot be made, which it says. Where another is lost while they meet, it says so
    and is there for the next group.

    What a step raises ends this, as a loss of its process would.
    """
    try:
        try:
            rank = part.build()
        except (OSError, ValueError, KeyError, MemoryError, RuntimeError) as error:
            link.send(encode(RankRefusal(f"{type(error).__name__}: {error}")))
            return
        shard = RankShard(link, part)
        while True:
            match shard.next():
                case ComputeBatch() as told:
                    shard.hidden = rank.forward(told.batch, meeting.exchange)
                    if shard.hidden is None:
                        meeting.leave()  # so that those that wait for this rank know, too
                case AllocateCache(blocks):
                    rank.allocate(blocks)
                case RecordGraphs(sequences, blocks):
                    rank.record(sequences, blocks)
                case MeasureMemory():
                    link.send(encode(MemoryLeft(*rank.memory())))
                case ServeShard() as told:
                    shard.serve(told)
                case ShardMessage() as told:
                    shard.follow(told)
                case FormGroup(question):
                    link.send(encode(GroupMember(question, meeting.form())))
                case MeetGroup() as told:
                    met = GroupMember(told.question)
                    try:
                        meeting.meet(told)
                    except PeerLostError:
                        meeting.leave()  # so that those that wait for this rank know, too
                        met = GroupMember(told.question, NOT_MET)
                    link.send(encode(met))
    except PeerLostError:
        return
