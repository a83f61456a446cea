"""How API processes and the engine process talk: one message per step to each of them.

A stream socket whose file only this user can reach, and msgpack of the dataclasses themselves. No
thread stands between the two, so a message wakes its reader alone; and each learns at once that the
other is gone, for the system closes what a dead process leaves open.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lexshard.actors.messages import Commands, SequenceEvent, StepOutput
from lexshard.cluster.engine import submissions
from lexshard.cluster.link import Link, PeerLostError

_output_encoder = msgspec.msgpack.Encoder()
_output_decoder = msgspec.msgpack.Decoder(StepOutput)

_READS = 16  # of one connection, one after the other: steps go on between what is longer
# What an API process that does not read may cost the engine before it is given up.
MAX_UNREAD_BYTES = 256 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Connection:
    """One API process, as the engine sees it. ``unfinished`` counts sequences by request."""

    link: Link
    unfinished: dict[str, int] = field(default_factory=dict)
    watched_for_room: bool = False


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
        self._poll = select.poll()  # `epoll` is Linux's alone
        self._poll.register(self._listener, select.POLLIN)
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

    def asked(self) -> bool:
        """Whether commands have come that are still to be received."""
        if not self._received:
            self._look(0.0)
        return bool(self._received)

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
                connection.link.post(_output_encoder.encode(own))
                self._watch(connection)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.link.close()
        self._connections.clear()
        self._listener.close()

    def _look(self, wait_seconds: float) -> None:
        for descriptor, happened in self._poll.poll(math.ceil(1e3 * max(0.0, wait_seconds))):
            if descriptor == self._listener.fileno():
                self._accept()
                continue
            connection = self._connections[descriptor]
            if happened & select.POLLOUT:
                connection.link.flush()
                self._watch(connection)
            try:
                for message in connection.link.arrived(_READS):
                    self._note(connection, submissions.decode(message))
            except PeerLostError:
                self._drop(connection)
        for connection in list(self._connections.values()):
            if connection.link.unsent_bytes > MAX_UNREAD_BYTES:
                self._drop(connection)

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        self._connections[connected.fileno()] = _Connection(Link(connected))
        self._poll.register(connected, select.POLLIN)

    def _watch(self, connection: _Connection) -> None:
        """Room in a socket is news only while something waits for it: whatever the other side
        reads makes room, so an engine at rest would be woken by its own reports."""
        waits = connection.link.unsent_bytes > 0
        if waits != connection.watched_for_room:
            connection.watched_for_room = waits
            events = select.POLLIN | select.POLLOUT if waits else select.POLLIN
            self._poll.modify(connection.link, events)

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
        if self._connections.pop(connection.link.fileno(), None) is None:
            return
        self._last_left = time.monotonic()
        self._poll.unregister(connection.link)
        connection.link.close()
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
        self._link = Link(connected)
        self._hear = hear
        self._loop.add_reader(self._link, self._receive)

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
        self._link.post(submissions.encode(commands))
        if self._link.unsent_bytes:
            self._loop.add_writer(self._link, self._flush)
        return True

    def close(self) -> None:
        """The engine is told nothing more and not heard any more."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()
        if not self.lost.done():
            self.lost.set_result(None)

    def _flush(self) -> None:
        self._link.flush()
        if not self._link.unsent_bytes:
            self._loop.remove_writer(self._link)

    def _receive(self) -> None:
        try:
            for message in self._link.arrived():
                self._hear(_output_decoder.decode(message))
        except PeerLostError:
            self.close()
