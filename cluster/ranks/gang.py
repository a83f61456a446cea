"""The other ranks of a body, however they are started: formed into groups, replaced when lost."""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from math import inf
from typing import Protocol

from lexshard.actors.body.parallel.messages import (
    FormGroup,
    GroupMember,
    MeasureMemory,
    MeetGroup,
    MemoryLeft,
    RankMessage,
    RankPart,
    RankRefusal,
    ShardMessage,
    decode_rank_reply,
)
from lexshard.actors.body.parallel.sums import RankGroup, RankLostError
from lexshard.actors.collective import CollectiveError
from lexshard.actors.packed_arrays import encode
from lexshard.actors.role import Place, RunningRole
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.ranks.server import NOT_MET, Meeting
from lexshard.cluster.ranks.sockets import KEY_BYTES

# Replacements in a row of those that are lost before they have begun.
MOST_REPLACED = 8

logger = logging.getLogger("lexshard.ranks")


class RankHandle(Protocol):
    """One rank elsewhere."""

    link: Link
    place: Place

    def answers(self) -> bool:
        """Whether it is worth asking: not where it is known to have gone or to be stopped."""

    def close(self) -> None:
        """Ends it, also where it is stopped."""


class RankGang(ABC):
    """One for each of ``parts``, which are those of ranks 1 and up; see `OtherRanks`."""

    def __init__(self, parts: Sequence[RankPart]) -> None:
        self._parts = parts
        self._members: list[RankHandle] = []
        self._places: dict[int, tuple[str, int] | None] = {}  # where they listen, if they do
        # By which question each has been asked to form a group that has not answered.
        self._asked: dict[int, int] = {}
        self._questions = count(1)
        try:
            for part in parts:
                self._members.append(self._start(part))
        except BaseException:
            self.close()
            raise

    def form(self) -> RankGroup:
        """See `OtherRanks`. The first group is of processes that may still load."""
        self._leave()
        for _ in range(MOST_REPLACED):
            lost = self._ask_all()
            if lost is None:
                return self._meet()
            logger.warning("rank %d does not answer and is replaced", lost + 1)
            self._asked.pop(lost, None)
            self._members[lost].close()
            self._members[lost] = self._start(self._parts[lost])
        raise RankLostError(f"{MOST_REPLACED} ranks in a row were lost before they had begun")

    def tell(self, message: RankMessage) -> None:
        packed = encode(message)
        for member in self._members:
            try:
                member.link.send(packed)
            except PeerLostError as error:
                raise RankLostError(str(error)) from error

    def memory(self) -> list[MemoryLeft]:
        self.tell(MeasureMemory())
        try:
            found = [self.answer(number, 0) for number in range(len(self._members))]
        except PeerLostError as error:
            raise RankLostError(str(error)) from error
        return [each for each in found if isinstance(each, MemoryLeft)]

    def roles(self) -> list[RunningRole]:
        ranks = len(self._members) + 1
        pairs = zip(self._members, self._parts, strict=True)
        return [
            RunningRole("body", rank, member.place, part.device or "cpu", f"rank {rank} of {ranks}")
            for rank, (member, part) in enumerate(pairs, 1)
        ]

    @property
    def members(self) -> tuple[RankHandle, ...]:
        """Those of rank 1 and up that there are now."""
        return tuple(self._members)

    def hear(self, number: int, seconds: float = inf) -> GroupMember | MemoryLeft | ShardMessage:
        """What the member of this number says next. Raises PeerLostError, also where it says
        nothing for so many ``seconds``, and RankLostError with the reason where it, or its shard,
        cannot be made."""
        reply = decode_rank_reply(self._members[number].link.receive(seconds))
        if isinstance(reply, RankRefusal):
            raise RankLostError(f"rank {number + 1} cannot be made: {reply.reason}")
        return reply

    def question(self) -> int:
        """The number of one that is about to be asked."""
        return next(self._questions)

    def answer(self, number: int, question: int, seconds: float = inf) -> GroupMember | MemoryLeft:
        """What the member of this number says to a ``question``, 0: of its memory. Passed over is
        what it, or its shard, has said to a group that has ended, or was never formed."""
        while True:
            reply = self.hear(number, seconds)
            if not isinstance(reply, ShardMessage) and reply.question == question:
                return reply

    def close(self) -> None:
        """Closing twice is harmless."""
        self._leave()
        for member in self._members:
            member.close()
        self._members = []

    def _ask_all(self) -> int | None:
        """All are asked to form a group, and have answered; else who did not."""
        for number, member in enumerate(self._members):
            if not member.answers():
                return number
            if number not in self._asked:
                question = self.question()
                try:
                    member.link.send(encode(FormGroup(question)))
                except PeerLostError:
                    return number
                self._asked[number] = question
        for number, question in sorted(self._asked.items()):
            try:
                reply = self.answer(number, question)
            except PeerLostError:
                return number
            assert isinstance(reply, GroupMember)
            self._places[number + 1] = reply.place
            del self._asked[number]
        return None

    def _meet_by(self, own: Meeting) -> RankGroup:
        """Of ranks that connect to each other: ``own`` is the first one's way to meet them."""
        try:
            listening = {0: own.form(), **self._places}
            places = [listening[rank] for rank in sorted(listening)]
            told = MeetGroup(
                tuple(each for each in places if each is not None),
                secrets.token_bytes(KEY_BYTES),
                self.question(),
            )
            self.tell(told)
            own.meet(told)
            for number in range(len(self._members)):
                if self.answer(number, told.question) == GroupMember(told.question, NOT_MET):
                    raise PeerLostError(f"rank {number + 1} has not met the others")
        except (PeerLostError, CollectiveError) as error:
            raise RankLostError(str(error)) from error
        return own.exchange

    @abstractmethod
    def _start(self, part: RankPart) -> RankHandle:
        """A process that makes the rank of ``part``. Raises RankLostError where there is none."""

    @abstractmethod
    def _leave(self) -> None:
        """Ends what the group that there was is waiting for."""

    @abstractmethod
    def _meet(self) -> RankGroup:
        """The group of those that have formed it. Raises RankLostError."""
