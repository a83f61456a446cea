"""The process of one rank: ``python -m lexshard.cluster.ranks.main``, told a `RankOrder`.

It ends when its owner does, however that ended.
"""

from __future__ import annotations

import signal
import socket

import msgspec

from lexshard.actors.body.parallel.messages import RankPart
from lexshard.cluster.link import Link
from lexshard.cluster.ranks.board import Board
from lexshard.cluster.ranks.meeting import HOST, GroupMeeting, use_device
from lexshard.cluster.ranks.server import Meeting, serve_rank
from lexshard.cluster.roles.process import end_with_owner, read_order
from lexshard.cluster.shared_memory.segment import Segment


class RankOrder(msgspec.Struct, frozen=True):
    """What a rank's process is told; ``link`` and ``memory`` are descriptors that it is handed, no
    memory for ranks that meet otherwise."""

    part: RankPart
    seconds: float
    link: int
    memory: int | None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to handle
    order = read_order(RankOrder)
    end_with_owner()
    import torch

    torch.set_num_threads(1)
    part = order.part
    meeting: Meeting
    if order.memory is None:
        assert part.device is not None
        use_device(part.device)
        meeting = GroupMeeting(part, order.seconds, HOST)
    else:
        hidden = part.plan.shape.hidden
        meeting = Board(Segment(order.memory), part.rank, part.ranks, hidden, order.seconds)
    serve_rank(Link(socket.socket(fileno=order.link)), part, meeting)


if __name__ == "__main__":
    main()
