"""A sharded head that outlives its shards: a lost one is replaced, and the step is done again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import Collective, CollectiveError
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.paper.cluster_shard import ClusterShard
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.sharded.announcements import RowNames
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_shard
from lexshard.actors.messages import Request
from lexshard.actors.role import RunningRole, here
from lexshard.actors.states.deltas import Deltas, OpenSequence, Outbox
from lexshard.actors.states.need import Need
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

    def start(self, parts: Sequence[ShardPart]) -> Gang:
        """Starts a process for each of ``parts``, rank 1 first."""
        ...


@dataclass(frozen=True, slots=True)
class _Member:
    """A sequence: its request and its tokens (the engine's own list)."""

    request: Request
    history: list[int]

    def opening(self, sequence: int) -> OpenSequence:
        output = tuple(self.history[len(self.request.prompt_ids) :])
        return OpenSequence(sequence, self.request, output)


class RecoveringHead(SequenceHead):
    """The first of ``parts`` here, the others in the processes of a gang of ``starter``.

    ``states`` are the engine's own. A step is a pure function of hidden states and of what
    sequences have said, so that one that was lost with a shard is done again by the next group,
    with the same answer. Raises what starting raises and, in a step, `CollectiveError` where no
    group lasts.
    """

    def __init__(
        self, parts: Sequence[ShardPart], starter: ShardStarter, states: SequenceStates
    ) -> None:
        self._members: dict[int, _Member] = {}
        self._outbox = Outbox()
        self.device = torch.device(parts[0].device)
        self._gang = starter.start(parts[1:])
        try:
            self._shard, self._ids = build_shard(parts[0]), parts[0].owned.ids
            self._group: CollectiveHead | None = self._formed()
        except BaseException:
            self._gang.close()
            raise
        super().__init__(self._group, states)
        self.counters.traffic = self._group.traffic

    @property
    def own(self) -> OutputHead:
        """The shard that is here, as a head of its rows alone."""
        return self._shard.head if isinstance(self._shard, ClusterShard) else self._shard

    def open(self, sequence: int, request: Request, history: list[int]) -> None:
        self._members[sequence] = member = _Member(request, history)
        self._outbox.open(member.opening(sequence))

    def append(self, sequence: int, *token_ids: int) -> None:
        if sequence in self._outbox.opened:
            self._outbox.open(self._members[sequence].opening(sequence))
        else:
            self._outbox.append(sequence, token_ids)

    def close(self, sequence: int) -> None:
        del self._members[sequence]
        self._outbox.close(sequence)

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
        needs: Sequence[Need],
        sequences: Sequence[int] = (),
        drafted: Sequence[tuple[int, ...]] = (),
    ) -> Candidates:
        names = RowNames(sequences, drafted) if sequences else None
        for attempt in range(ATTEMPTS):
            try:
                group = self._group or self._regrouped()
                group.tell(self._outbox.take())
                return group.rescore(group.screen(hidden, needs, names))
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
        self._outbox = Outbox()
        everything = tuple(member.opening(name) for name, member in self._members.items())
        group.tell(Deltas(opened=everything))
        for operation, before in self.counters.traffic.items():
            group.traffic[operation].go_on_from(before)
        self.counters.traffic = group.traffic
        self.counters.regroupings += 1
        self.counters.seconds += time.perf_counter() - started
        self._group = group
        return group
