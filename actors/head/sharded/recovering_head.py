"""A sharded head that outlives its shards: a lost one is replaced, and the step is done again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import Collective, CollectiveError
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_shard
from lexshard.actors.messages import Request
from lexshard.actors.role import RunningRole, here
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates

# Groups that are formed for one step before the head gives up.
ATTEMPTS = 4

logger = logging.getLogger("lexshard.shards")


class Gang(Protocol):
    """The processes of a head's other shards."""

    def form(self) -> Collective:
        """A new group of theirs, of which this process is the root; who is missing, or does not
        answer, is replaced. Raises `CollectiveError` where it cannot be formed."""
        ...

    def roles(self) -> list[RunningRole]:
        """Who they are."""
        ...

    def close(self) -> None:
        """Ends them all."""
        ...


class ShardStarter(Protocol):
    """What an engine is given to have shards elsewhere; the cluster layer knows how."""

    def assign(self, vocabulary_size: int) -> Sequence[OwnedRows]:
        """Which tokens are whose, the engine's own shard first."""
        ...

    def start(self, parts: Sequence[ShardPart], body: Body) -> Gang:
        """Starts a process for each of ``parts``, rank 1 first, or gives them to the ranks of the
        ``body``."""
        ...


class RecoveringHead(SequenceHead):
    """The first of ``parts`` here, the others in the processes of a gang of ``starter``.

    ``states`` and ``body`` are the engine's own. A step is a pure function of hidden states and of
    what sequences have said, so that one that was lost with a shard is done again by the next
    group, with the same answer. Raises what starting raises and, in a step, `CollectiveError` where
    no group lasts.
    """

    def __init__(
        self,
        parts: Sequence[ShardPart],
        starter: ShardStarter,
        states: SequenceStates,
        body: Body,
    ) -> None:
        self._follower = Follower()  # all other shards are told the same
        self.device = torch.device(parts[0].device)
        self._gang = starter.start(parts[1:], body)
        try:
            self._shard, self._ids = build_shard(parts[0]), parts[0].owned.ids
            self._group: CollectiveHead | None = self._formed()
        except BaseException:
            self._gang.close()
            raise
        super().__init__(self._shard, states)  # of its rows alone, by itself
        self.counters.traffic = self._group.traffic

    def open(self, sequence: int, request: Request, history: list[int]) -> None:
        self._follower.open(sequence, FollowedSequence(request, history))

    def append(self, sequence: int, *token_ids: int) -> None:
        self._follower.append(sequence, token_ids)

    def close(self, sequence: int) -> None:
        self._follower.close(sequence)

    def roles(self) -> list[RunningRole]:
        own = RunningRole("shard", 0, here(), str(self.device), f"{len(self._ids)} tokens")
        return [own, *self._gang.roles()]

    def shut_down(self) -> None:
        if self._group is not None:
            self._group.close()
        self._gang.close()

    def _decide(
        self,
        hidden: torch.Tensor,
        rows: RowTable,
        names: RowNames | None = None,
    ) -> Candidates:
        for attempt in range(ATTEMPTS):
            try:
                group = self._group or self._regrouped()
                group.tell(self._follower.take())
                return group.candidates(hidden, rows, names)
            except CollectiveError as error:
                logger.warning("a shard is lost and will be replaced: %s", error)
                self._group = None
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _formed(self) -> CollectiveHead:
        return CollectiveHead(self._shard, self._ids, self._gang.form())

    def _regrouped(self) -> CollectiveHead:
        """A new group, which is told of all sequences there are."""
        started = time.perf_counter()
        group = self._formed()
        group.tell(self._follower.anew())
        for operation, before in self.counters.traffic.items():
            group.traffic[operation].go_on_from(before)
        self.counters.traffic = group.traffic
        self.counters.regroupings += 1
        self.counters.seconds += time.perf_counter() - started
        self._group = group
        return group
