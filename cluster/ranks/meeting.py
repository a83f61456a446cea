"""Ranks of a decoder of torch come together: by NCCL on GPUs, by gloo elsewhere.

The first rank opens a store where the others find each other. What they add up goes its own way
then; what each is told goes over its link, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed import TCPStore

from lexshard.actors.body.parallel.messages import MeetGroup, RankPart
from lexshard.actors.body.parallel.sums import OneRank, RankSums
from lexshard.actors.collective import ROOT, CollectiveError
from lexshard.cluster.collective.gloo_links import GlooLinks, open_store
from lexshard.cluster.collective.nccl_links import CupyGroup
from lexshard.cluster.collective.rank_sums import GlooSums, NcclSums
from lexshard.cluster.link import PeerLostError
from lexshard.cluster.ports import own_address
from lexshard.cluster.ranks.sockets import SocketMeeting

HOST = "127.0.0.1"  # of ranks that are children of one process
FORMING_SECONDS = 60.0  # NCCL looks at the machine first


class GroupMeeting:
    """The rank that ``part`` says, which is reached at ``host``. ``seconds`` is how long any may
    keep another waiting in a step."""

    def __init__(self, part: RankPart, seconds: float, host: str) -> None:
        assert part.device is not None, "compiled stacks meet otherwise"
        self._rank, self._ranks, self._device = part.rank, part.ranks, part.device
        self._seconds = seconds
        self._host = host
        self._store: TCPStore | None = None
        self._links: GlooLinks | None = None
        self.exchange: RankSums = OneRank()

    def form(self) -> tuple[str, int] | None:
        """See `cluster.ranks.server.Meeting`."""
        self.leave()
        if self._rank != ROOT:
            return None
        self._store = open_store(self._host, 0, FORMING_SECONDS, root=True)
        return self._host, int(self._store.port)

    def meet(self, told: MeetGroup) -> None:
        """Returns when all are connected. Raises PeerLostError where one does not come in time."""
        host, port = told.places[ROOT]
        try:
            if self._rank != ROOT:
                self._store = open_store(host, port, FORMING_SECONDS, root=False)
            assert self._store is not None, "it has formed a group"
            if self._device == "cpu":
                self._links = GlooLinks(
                    self._store,
                    told.key.hex(),
                    self._rank,
                    self._ranks,
                    address=own_address(host, port),
                    forming_seconds=FORMING_SECONDS,
                )
                self.exchange = GlooSums(self._links, self._seconds)
            else:
                with torch.cuda.device(self._device):
                    group = CupyGroup(self._store, told.key.hex(), self._rank, self._ranks)
                # A rank may have to compile first; one that has gone is seen at once.
                seconds = max(self._seconds, FORMING_SECONDS)
                self.exchange = NcclSums(group, seconds)
        except (CollectiveError, RuntimeError, OSError) as error:
            raise PeerLostError(f"ranks did not meet: {error}") from error

    def interrupt(self) -> None:
        """Ends what waits on this rank's GPU for others, from any thread."""
        if isinstance(self.exchange, NcclSums):
            self.exchange.abort()

    def leave(self) -> None:
        """Peers that wait in the group stop waiting; from any thread."""
        self.interrupt()
        links, self._links = self._links, None  # from any thread
        if links is not None:
            links.close()


def use_device(device: str) -> None:
    """The GPU ``device`` is this process's, if it is one."""
    if device != "cpu":
        torch.cuda.set_device(device)


def first_part(parts: Sequence[RankPart]) -> RankPart:
    """That of the first rank, from those of the others: GPUs follow on its own."""
    part = parts[0]
    if part.device in (None, "cpu"):
        return replace(part, rank=ROOT)
    own = torch.device(part.device).index - part.rank
    return replace(part, rank=ROOT, device=f"cuda:{own}")


def meeting_of(part: RankPart, seconds: float, host: str) -> SocketMeeting | GroupMeeting:
    """How the rank of ``part`` meets others on other machines; it is reached at ``host``."""
    if part.device is not None:
        return GroupMeeting(part, seconds, host)
    return SocketMeeting(part.rank, part.ranks, part.plan.shape.hidden, seconds, host)
