"""How API processes and the engine process talk: one message per step to each of them.

A stream socket whose file only this user can reach, and frames of msgpack of the dataclasses
themselves, so nothing that arrives is ever executed. No thread stands between the two, so a message
wakes its reader alone; and each learns at once that the other is gone, for the system closes
what a dead process leaves open.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from lexshard.actors.messages import Commands, SequenceEvent, StepOutput
from lexshard.cluster.engine import submissions
from lexshard.cluster.frames import Frames, framed

_output_encoder = msgspec.msgpack.Encoder()
_output_decoder = msgspec.msgpack.Decoder(StepOutput)

_READ_BYTES = 256 * 1024
_READS = 16  # of one connection, one after the other: steps go on between what is longer
# What an API process that does not read may cost the engine before it is given up.
MAX_UNREAD_BYTES = 256 * 1024 * 1024


class _Connection:
    """One API process, as the engine sees it. ``unfinished`` counts sequences by request."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.unfinished: dict[str, int] = {}
        self.watched_for_room = False
        self._frames = Frames()
        self._unsent = bytearray()

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def receive(self) -> Iterator[Commands]:
        """What has arrived, or a part of it where that is much.

        Raises:
            ConnectionError: it is gone.
        """
        for _ in range(_READS):
            try:
                piece = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                raise ConnectionResetError("the API process has ended")
            yield from map(submissions.decode, self._frames.cut(piece))

    def send(self, frame: bytes) -> None:
        """Sends what the socket takes now and keeps the rest for `flush`."""
        if self._unsent:
            self._unsent += frame
            return
        try:
            sent = self.socket.send(frame)
        except OSError:  # full, or gone: the reader will see
            sent = 0
        if sent < len(frame):
            self._unsent += frame[sent:]

    def flush(self) -> None:
        while self._unsent:
            try:
                del self._unsent[: self.socket.send(self._unsent)]
            except OSError:
                return


class EngineSide:
    """The engine's end: a ``CommandSource`` and a place to emit outputs.

    Any number of API processes may connect. What happens to a sequence is told to the one that
    submitted it; of one that is gone every sequence is cancelled. ``stop`` reaches the engine when
    the last of them has asked for it. All methods are called in one thread.
    """

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen()
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}
        self._owners: dict[str, _Connection] = {}
        self._received: deque[Commands] = deque()
        self._last_left = time.monotonic()

    @property
    def deserted_seconds(self) -> float:
        """How long no client has been connected. May be asked in any thread."""
        return 0.0 if self._connections else time.monotonic() - self._last_left

    def receive(self, wait_seconds: float) -> Commands | None:
        """The next commands; only those end the wait, not what is read, sent or connected."""
        deadline = time.monotonic() + wait_seconds
        left = wait_seconds
        while not self._received:
            self._look(left)
            left = deadline - time.monotonic()
            if left <= 0:
                break
        return self._received.popleft() if self._received else None

    def emit(self, output: StepOutput) -> None:
        told: dict[_Connection, list[SequenceEvent]] = {
            connection: [] for connection in self._connections.values()
        }
        for event in output.events:
            owner = self._owners.get(event.request_id)
            if owner is None:  # it has cancelled, or is gone
                continue
            told[owner].append(event)
            if event.finish_reason is not None:
                self._count_end(owner, event.request_id)
        for connection, events in told.items():
            if events or output.statistics is not None or not output.events:
                own = StepOutput(tuple(events), output.statistics)
                connection.send(framed(_output_encoder.encode(own)))
                self._watch(connection)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._listener.close()
        self._poll.close()

    def _look(self, wait_seconds: float) -> None:
        for descriptor, happened in self._poll.poll(wait_seconds):
            if descriptor == self._listener.fileno():
                self._accept()
                continue
            connection = self._connections[descriptor]
            if happened & select.EPOLLOUT:
                connection.flush()
                self._watch(connection)
            try:
                for commands in connection.receive():
                    self._note(connection, commands)
            except OSError:
                self._drop(connection)
        for connection in list(self._connections.values()):
            if connection.unsent_bytes > MAX_UNREAD_BYTES:
                self._drop(connection)

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        connected.setblocking(False)
        self._connections[connected.fileno()] = _Connection(connected)
        self._poll.register(connected, select.EPOLLIN)

    def _watch(self, connection: _Connection) -> None:
        """Room in a socket is news only while something waits for it: whatever the other side
        reads makes room, so an engine at rest would be woken by its own reports."""
        waits = connection.unsent_bytes > 0
        if waits != connection.watched_for_room:
            connection.watched_for_room = waits
            events = select.EPOLLIN | select.EPOLLOUT if waits else select.EPOLLIN
            self._poll.modify(connection.socket, events)

    def _note(self, connection: _Connection, commands: Commands) -> None:
        if commands.stop:
            self._drop(connection)
            if not self._connections:
                self._received.append(commands)
            return
        for request in commands.submit:
            open_sequences = connection.unfinished.get(request.request_id, 0)
            connection.unfinished[request.request_id] = open_sequences + 1
            self._owners[request.request_id] = connection
        for request_id in commands.cancel:
            self._forget(request_id)
        self._received.append(commands)

    def _drop(self, connection: _Connection) -> None:
        """What it has asked for is not wanted any more."""
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        self._last_left = time.monotonic()
        connection.socket.close()
        abandoned = tuple(connection.unfinished)
        for request_id in abandoned:
            self._forget(request_id)
        if abandoned:
            self._received.append(Commands(cancel=abandoned))

    def _count_end(self, owner: _Connection, request_id: str) -> None:
        owner.unfinished[request_id] -= 1
        if not owner.unfinished[request_id]:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        connection = self._owners.pop(request_id, None)
        if connection is not None:
            del connection.unfinished[request_id]


class ClientSide:
    """An API process's end, inside its event loop. ``hear`` is called with every output as it
    arrives; ``lost`` is done when the engine is gone.

    What is sent leaves at once. An event loop's own transport would keep it until everything that
    is ready has run: of thirty requests that arrive together the engine would see none before the
    last of them is prepared.
    """

    def __init__(self, connected: socket.socket, hear: Callable[[StepOutput], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._socket = connected
        self._hear = hear
        self._frames = Frames()
        self._unsent = bytearray()
        self._loop.add_reader(connected, self._receive)

    @classmethod
    async def connect(cls, path: str, hear: Callable[[StepOutput], None]) -> ClientSide:
        """Raises:
        OSError: nothing listens there.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connected, path)
        except BaseException:
            connected.close()
            raise
        return cls(connected, hear)

    def send(self, commands: Commands) -> bool:
        """False, and nothing happens, when the engine is gone, which ``lost`` tells."""
        if self.lost.done():
            return False
        frame = framed(submissions.encode(commands))
        if self._unsent:
            self._unsent += frame
            return True
        sent = self._send(frame)
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._loop.add_writer(self._socket, self._flush)
        return True

    def close(self) -> None:
        """The engine is told nothing more and not heard any more."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
        if not self.lost.done():
            self.lost.set_result(None)

    def _send(self, content: bytes | bytearray) -> int:
        try:
            return self._socket.send(content)
        except OSError:  # full, or gone: the reader will see
            return 0

    def _flush(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            piece = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self.close()
            return
        for frame in self._frames.cut(piece):
            self._hear(_output_decoder.decode(frame))
