"""Whole messages over a stream socket: how any two processes of a server talk to each other.

What stands in a message is its users' affair: msgpack of dataclasses everywhere, so that nothing
that arrives is ever executed.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterator
from math import inf

from lexshard.cluster.roles.stopped import LOOK_SECONDS, StoppedProcess

LENGTH_BYTES = 4
_READ_BYTES = 1 << 18


class PeerLostError(ConnectionError):
    """The process at the other end has gone, or cannot be reached."""


class Link:
    """One end: messages of any length, each behind its length, in order.

    `post` and `arrived` never wait, `send` and `receive` do. What arrives while a message is sent
    is kept, so two that send to each other at the same time never wait for each other. A ``peer``
    is looked at while it is waited for, and counts as gone once it is stopped for good.
    """

    def __init__(self, end: socket.socket, peer: StoppedProcess | None = None) -> None:
        end.setblocking(False)
        self._socket = end
        self._peer = peer
        self._unsent = bytearray()
        self._unread = bytearray()
        self._inbox: deque[bytes] = deque()
        self._ended = False
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._movable = select.poll()
        self._movable.register(end, select.POLLIN | select.POLLOUT)

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def post(self, message: bytes) -> None:
        """Sends what the socket takes now and keeps the rest for `flush`."""
        frame = len(message).to_bytes(LENGTH_BYTES, "little") + message
        sent = 0 if self._unsent else self._push(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]

    def flush(self) -> None:
        """Sends what the socket takes now of what was kept."""
        while self._unsent and (sent := self._push(self._unsent)):
            del self._unsent[:sent]

    def arrived(self, reads: int = 1) -> Iterator[bytes]:
        """What has come, or a part of it where that takes more than ``reads`` of the socket.

        Raises `PeerLostError` where nothing can come any more.
        """
        for _ in range(reads):
            more = self._pull()
            while self._inbox:
                yield self._inbox.popleft()
            if self._ended:
                raise PeerLostError("the other process has gone")
            if not more:
                return

    def send(self, message: bytes) -> None:
        """Waits until all of it is on its way. Raises `PeerLostError` where the peer is gone."""
        self.post(message)
        while self._unsent:
            self.wait(self._movable)
            self._pull()
            if self._ended:
                raise PeerLostError("the other process has gone")
            self.flush()

    def receive(self, seconds: float = inf) -> bytes:
        """The next message; waits for it. Raises `PeerLostError` where none can come any more, or
        nothing does for so many ``seconds``."""
        while not self._inbox:
            if self._ended:
                raise PeerLostError("the other process has gone")
            self.wait(self._readable, seconds)
            self._pull()
        return self._inbox.popleft()

    def wait(self, progress: select.poll, seconds: float = inf) -> None:
        """Waits for an event. Raises `PeerLostError` where the peer is stopped for good, or there
        is none for so many ``seconds``."""
        pause = seconds if self._peer is None else LOOK_SECONDS
        waited = 0.0
        while not progress.poll(None if pause == inf else 1000.0 * pause):
            if self._peer is not None and self._peer.look():
                raise PeerLostError("the other process has been stopped")
            waited += pause
            if waited >= seconds:
                raise PeerLostError(f"the other process has not answered for {seconds:g} s")

    def has_ended(self) -> bool:
        """Whether the peer has gone, for a thread that takes nothing in."""
        ending = select.poll()
        try:
            ending.register(self._socket, getattr(select, "POLLRDHUP", select.POLLHUP))
        except ValueError:  # closed at this end
            return True
        return bool(ending.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _push(self, content: bytes | bytearray) -> int:
        try:
            return self._socket.send(content)
        except OSError:  # full, or gone: a read tells
            return 0

    def _pull(self) -> bool:
        """Takes in what one read of the socket gives; whether there was anything."""
        try:
            piece = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        self._ended = self._ended or not piece
        unread = self._unread
        unread += piece
        start = 0
        while len(unread) - start >= LENGTH_BYTES:
            begin = start + LENGTH_BYTES
            stop = begin + int.from_bytes(unread[start:begin], "little")
            if stop > len(unread):
                break
            self._inbox.append(bytes(unread[begin:stop]))
            start = stop
        del unread[:start]
        return bool(piece)
