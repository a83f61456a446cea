"""The other ranks of a body as children of its process, with memory that all share.

A child that ends, however it does, ends every wait for it at once; one that has been stopped for a
second (`cluster.roles.stopped`) is killed. What is asked of the others goes through sockets, what
they add up through memory. Nothing of it has a name, so nothing is left.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

import msgspec

from lexshard.actors.body.parallel.messages import (
    FormGroup,
    RankMessage,
    RankPart,
    RankRefusal,
    decode_rank_reply,
)
from lexshard.actors.body.parallel.parallel_body import RankLostError
from lexshard.actors.packed_arrays import encode
from lexshard.actors.role import Place, RunningRole, here
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.ranks.board import Board, board_bytes
from lexshard.cluster.ranks.main import RankOrder
from lexshard.cluster.roles.process import ProcessRole, command_of, start_process
from lexshard.cluster.roles.stopped import LOOK_SECONDS, StoppedProcess
from lexshard.cluster.shared_memory.segment import Segment
from lexshard.kernels.parallel import Exchange

COMMAND = command_of("lexshard.cluster.ranks.main")
EXIT_SECONDS = 5.0

logger = logging.getLogger("lexshard.ranks")


class RankProcesses:
    """A child for each of ``parts``, which are those of ranks 1 and up; see `OtherRanks`.

    ``seconds`` is how long a rank may keep another waiting in a step.
    """

    def __init__(self, parts: Sequence[RankPart], *, seconds: float) -> None:
        shape = parts[0].plan.shape
        ranks = len(parts) + 1
        self._parts = parts
        self._seconds = seconds
        segment = Segment.create(board_bytes(ranks, shape.hidden))
        self._board = Board(segment, 0, ranks, shape.hidden, seconds)
        self._children = [_Child(part, self._board, seconds) for part in parts]
        self._formed = False

    def form(self) -> Exchange:
        """See `OtherRanks`. The first group is of processes that may still load."""
        self._board.stop()
        while (lost := self._asked()) is not None:
            logger.warning("rank %d does not answer and is replaced", lost + 1)
            self._children[lost].close()
            self._children[lost] = _Child(self._parts[lost], self._board, self._seconds)
        self._board.clear()
        self._formed = True
        return self._board.exchange

    def tell(self, message: RankMessage) -> None:
        packed = encode(message)
        for child in self._children:
            try:
                child.link.send(packed)
            except PeerLostError as error:
                raise RankLostError(str(error)) from error

    def roles(self) -> list[RunningRole]:
        host = here().host
        return [
            RunningRole("body", rank, Place(host, child.process_id), "cpu", f"rank {rank}")
            for rank, child in enumerate(self._children, 1)
        ]

    def close(self) -> None:
        """Closing twice is harmless."""
        self._board.stop()
        for child in self._children:
            child.close()
        self._children = []
        self._board.segment.close()

    def _asked(self) -> int | None:
        """All are asked to form a group, and have answered; else who did not."""
        for number, child in enumerate(self._children):
            if not child.asked:
                try:
                    child.link.send(encode(FormGroup()))
                    child.asked = True
                except PeerLostError:
                    return number
        for number, child in enumerate(self._children):
            if child.asked:
                try:
                    reply = decode_rank_reply(child.link.receive())
                except PeerLostError:
                    return number
                if isinstance(reply, RankRefusal):
                    raise RankLostError(f"rank {number + 1} cannot be made: {reply.reason}")
                child.asked = False
        return None


class _Child:
    """One process, and who watches over it."""

    def __init__(self, part: RankPart, board: Board, seconds: float) -> None:
        own, other = socket.socketpair()
        memory = board.segment.descriptor
        order = RankOrder(part, seconds, other.fileno(), memory)
        files = (other.fileno(), memory)
        role = ProcessRole(f"rank {part.rank}", COMMAND, msgspec.json.encode(order), files)
        try:
            one_thread = {"OMP_NUM_THREADS": "1"}
            self._process: subprocess.Popen[bytes] = start_process(role, environment=one_thread)
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
        self.process_id = self._process.pid
        self.link = Link(own, StoppedProcess(self.process_id))
        self.asked = False
        self._board = board
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name=f"rank-{part.rank}", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._closing = True
        self.link.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if StoppedProcess(self.process_id).now():
            self._process.kill()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._watcher.join()  # it stops nobody of the next group

    def _watch(self) -> None:
        """Sleeps until the system tells of the child's end, or that it was stopped."""
        while self._changed(os.WEXITED | os.WSTOPPED | os.WNOWAIT) == os.CLD_STOPPED:
            stopped = StoppedProcess(self.process_id)
            while stopped.now():
                time.sleep(LOOK_SECONDS)
                if stopped.look():
                    self._process.kill()
                    break
            self._changed(os.WSTOPPED | os.WNOHANG)  # heard: the next wait is for what comes after
        if not self._closing:
            self._board.stop()

    def _changed(self, kinds: int) -> int:
        """What happened to the child; that it has exited where it is known no more."""
        try:
            found = os.waitid(os.P_PID, self.process_id, kinds)
        except ChildProcessError:
            return os.CLD_EXITED
        return os.CLD_EXITED if found is None else found.si_code
