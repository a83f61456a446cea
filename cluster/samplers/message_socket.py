"""Whole messages over a stream socket between two processes, of any length, in order."""

from __future__ import annotations

import select
import socket
from collections import deque

from lexshard.cluster.frames import Frames, framed
from lexshard.cluster.samplers.stopped import LOOK_SECONDS, StoppedProcess
from lexshard.cluster.shared_memory.doorbell import PeerLostError

_BYTES_AT_ONCE = 1 << 18


class MessageSocket:
    """One end. What arrives while a message is sent is kept, so two that send to each other at
    the same time never wait for each other.

    Where ``peer`` is given, it is looked at while it is waited for, and counts as gone once it is
    stopped for good.
    """

    def __init__(self, end: socket.socket, peer: StoppedProcess | None = None) -> None:
        self._socket = end
        self._peer = peer
        self._frames = Frames()
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._movable = select.poll()
        self._movable.register(end, select.POLLIN | select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Waits until all of it is on its way. Raises `PeerLostError` where the peer is gone."""
        unsent = memoryview(framed(message))
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                self.wait(self._movable)
                self._take_in()
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerLostError("the other process has gone") from error

    def receive(self) -> bytes:
        """The next message; waits for it. Raises `PeerLostError` where none can come any more."""
        while not self._inbox:
            if self._ended:
                raise PeerLostError("the other process has gone")
            self.wait(self._readable)
            self._take_in()
        return self._inbox.popleft()

    def receive_nowait(self) -> bytes | None:
        """The next message, None where none has arrived. Raises `PeerLostError` like `receive`."""
        if not self._inbox:
            self._take_in()
            if not self._inbox and not self._ended:
                return None
        return self.receive()

    def wait(self, progress: select.poll) -> None:
        """Waits for an event. Raises `PeerLostError` where the peer is stopped for good."""
        if self._peer is None:
            progress.poll()
            return
        while not progress.poll(1000.0 * LOOK_SECONDS):
            if self._peer.look():
                raise PeerLostError("the other process has been stopped")

    def close(self) -> None:
        self._socket.close()

    def _take_in(self) -> None:
        try:
            arrived = self._socket.recv(_BYTES_AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            arrived = b""
        if not arrived:
            self._ended = True
        self._inbox.extend(self._frames.cut(arrived))
