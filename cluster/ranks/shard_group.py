"""A group of shards of the head at the ranks of a body, over the links by which these are told what
to compute. Hidden states need not travel: every rank has those of the body's last step."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import torch

from lexshard.actors.body.parallel.messages import ShardMessage
from lexshard.actors.collective import ROOT, CollectiveLostError
from lexshard.actors.packed_arrays import encode
from lexshard.cluster.collective.star import Links, StarCollective
from lexshard.cluster.link import Link, PeerLostError

_ELSEWHERE = -1  # no row of the last step's


class ShardLinks:
    """`Links` of rank ``rank`` of ``size``: ``link_to`` another, from which ``hear`` gives what it
    says next to this rank's shard. Both raise `CollectiveError` and PeerLostError."""

    def __init__(
        self,
        rank: int,
        size: int,
        link_to: Callable[[int], Link],
        hear: Callable[[int, float], bytes],
    ) -> None:
        self.rank = rank
        self.size = size
        self._link_to = link_to
        self._hear = hear

    def send(self, data: torch.Tensor, rank: int) -> TakenOver:
        try:
            self._link_to(rank).send(encode(ShardMessage(data.numpy().tobytes())))
        except PeerLostError as error:
            raise _lost(rank, error) from error
        return TakenOver()

    def receive(self, into: torch.Tensor, rank: int) -> MessageToCome:
        return MessageToCome(into, rank, self._hear)

    def close(self) -> None:
        """The body's ranks need the links."""


class TakenOver:
    """What the system has is on its way."""

    def wait(self, seconds: float | None) -> None: ...


class MessageToCome:
    """What ``hear`` gives of ``rank``, for the tensor ``into``."""

    def __init__(self, into: torch.Tensor, rank: int, hear: Callable[[int, float], bytes]) -> None:
        self._into = into.numpy()
        self._rank = rank
        self._hear = hear

    def wait(self, seconds: float | None) -> None:
        try:
            content = self._hear(self._rank, inf if seconds is None else seconds)
        except PeerLostError as error:
            raise _lost(self._rank, error) from error
        self._into[...] = np.frombuffer(content, self._into.dtype).reshape(self._into.shape)


class RankCollective(StarCollective):
    """The group that ``links`` connect, each of which has what ``latest`` gives: the hidden states
    of the body's last step, equal on all ranks, if it has any."""

    def __init__(
        self, links: Links, seconds: float, latest: Callable[[], torch.Tensor | None]
    ) -> None:
        super().__init__(links, seconds)
        self._latest = latest

    def broadcast_hidden(
        self, hidden: torch.Tensor | None, rows: int, columns: int
    ) -> torch.Tensor:
        """Where they are rows of the last step's, which of them is all that is told."""
        latest = self._latest()
        first = torch.empty(1, dtype=torch.int64)
        with self._traffic["hidden"].measured() as traffic:
            if self.rank == ROOT:
                assert hidden is not None
                first[0] = _first_row(hidden, latest)
                self._send_bytes(first, self._others, traffic)
            else:
                self._receive_bytes([first], [ROOT], traffic)
        found = int(first)
        if found == _ELSEWHERE:
            return super().broadcast_hidden(hidden, rows, columns)
        assert latest is not None
        return latest[found : found + rows]


def _lost(rank: int, error: PeerLostError) -> CollectiveLostError:
    return CollectiveLostError(f"rank {rank}: {error}", rank)


def _first_row(hidden: torch.Tensor, latest: torch.Tensor | None) -> int:
    """Which row of ``latest`` the contiguous ``hidden`` begin with, in the same memory."""
    if latest is None or not latest.is_contiguous() or hidden.dtype != latest.dtype:
        return _ELSEWHERE
    if hidden.untyped_storage().data_ptr() != latest.untyped_storage().data_ptr():
        return _ELSEWHERE
    return (hidden.storage_offset() - latest.storage_offset()) // latest.shape[1]
