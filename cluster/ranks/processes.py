"""The other ranks of a body as children of its process, with memory that all share.

A child that ends, however it does, ends every wait for it at once; one that has been stopped for a
second (`cluster.roles.stopped`) is killed. What is asked of the others goes through sockets, what
they add up through memory. Nothing of it has a name, so nothing is left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

import msgspec

from lexshard.actors.body.parallel.messages import RankPart
from lexshard.actors.body.parallel.sums import RankGroup
from lexshard.actors.role import Place, here
from lexshard.cluster.link import Link
from lexshard.cluster.ranks.board import Board, board_bytes
from lexshard.cluster.ranks.gang import RankGang
from lexshard.cluster.ranks.main import RankOrder
from lexshard.cluster.ranks.meeting import HOST, GroupMeeting, first_part
from lexshard.cluster.roles.process import ProcessRole, command_of, start_process
from lexshard.cluster.roles.stopped import LOOK_SECONDS, StoppedProcess
from lexshard.cluster.shared_memory.segment import Segment

COMMAND = command_of("lexshard.cluster.ranks.main")
EXIT_SECONDS = 5.0


class RankProcesses(RankGang):
    """``seconds`` is how long a rank may keep another waiting in a step."""

    def __init__(self, parts: Sequence[RankPart], *, seconds: float) -> None:
        self._seconds = seconds
        self._own: Board | GroupMeeting
        if parts[0].device is None:
            hidden, ranks = parts[0].plan.shape.hidden, len(parts) + 1
            memory = Segment.create(board_bytes(ranks, hidden))
            self._own = Board(memory, 0, ranks, hidden, seconds)
        else:
            _check_gpus(parts)
            self._own = GroupMeeting(first_part(parts), seconds, HOST)
        super().__init__(parts)

    def close(self) -> None:
        super().close()
        if isinstance(self._own, Board):
            self._own.segment.close()

    def _start(self, part: RankPart) -> RankProcess:
        return RankProcess(part, self._own, self._seconds)

    def _leave(self) -> None:
        self._own.leave()

    def _meet(self) -> RankGroup:
        if isinstance(self._own, GroupMeeting):
            return self._meet_by(self._own)
        # All have answered, and touch nothing before they are told to compute.
        self._own.clear()
        return self._own.exchange


def _check_gpus(parts: Sequence[RankPart]) -> None:
    """Raises ValueError where a rank would have no GPU of its own."""
    import torch

    ranks, found = len(parts) + 1, torch.cuda.device_count()
    last = torch.device(parts[-1].device or "cpu")
    if last.type != "cpu" and last.index >= found:
        raise ValueError(
            f"--tensor-parallel {ranks} needs {ranks} GPUs and this machine has {found}: give a "
            "smaller number, or --backend ray with nodes that have them"
        )


class RankProcess:
    """One child, and the thread that watches over it."""

    def __init__(self, part: RankPart, meeting: Board | GroupMeeting, seconds: float) -> None:
        own, other = socket.socketpair()
        memory = meeting.segment.descriptor if isinstance(meeting, Board) else None
        order = RankOrder(part, seconds, other.fileno(), memory)
        files = (other.fileno(), *(() if memory is None else (memory,)))
        role = ProcessRole(f"rank {part.rank}", COMMAND, msgspec.json.encode(order), files)
        try:
            one_thread = {"OMP_NUM_THREADS": "1"}
            self._process: subprocess.Popen[bytes] = start_process(role, environment=one_thread)
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
        self._id = self._process.pid
        self.place = Place(here().host, self._id)
        self.link = Link(own, StoppedProcess(self._id))
        self._meeting = meeting
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name=f"rank-{part.rank}", daemon=True)
        self._watcher.start()

    def answers(self) -> bool:
        """Its socket tells."""
        return True

    def close(self) -> None:
        self._closing = True
        self.link.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if StoppedProcess(self._id).now():
            self._process.kill()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watcher.join()  # it ends no wait of the next group

    def _watch(self) -> None:
        """Sleeps until the system tells of the child's end, or that it was stopped (where it tells
        that: not everywhere)."""
        while self._changed(os.WEXITED | os.WSTOPPED | os.WNOWAIT) == os.CLD_STOPPED:
            stopped = StoppedProcess(self._id)
            while stopped.now():
                time.sleep(LOOK_SECONDS)
                if stopped.look():
                    self._process.kill()
                    break
            self._changed(os.WSTOPPED | os.WNOHANG)  # heard: the next wait is for what comes after
        if not self._closing:
            self._meeting.leave()

    def _changed(self, kinds: int) -> int:
        """What happened to the child; that it has exited where it is known no more."""
        if not hasattr(os, "waitid"):
            self._process.wait()
            return os.CLD_EXITED
        try:
            found = os.waitid(os.P_PID, self._id, kinds)
        except ChildProcessError:
            return os.CLD_EXITED
        return os.CLD_EXITED if found is None else found.si_code
