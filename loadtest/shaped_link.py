"""A link between two ends on this machine that is as thin, slow and bad as is wanted.

    async with ShapedLink("127.0.0.1", 8000, LinkShape(bits_per_second=1e5, delay=0.05)) as link:
        ...  # connect to link.port instead of 8000

Bytes are taken in packets, each way through a queue of its own: a packet is sent when those before
it are, at the rate, and arrives ``delay`` later, with ``jitter`` added to or taken from it, never
before its predecessor. Of a packet that is lost nothing is heard until it has been sent again, as
TCP does: after a round trip and `RETRANSMIT_SECONDS`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

PACKET_BYTES = 1400
RETRANSMIT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One way of a link; ``delay`` and ``jitter`` in seconds, ``loss`` the share of packets."""

    bits_per_second: float = float("inf")
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


@dataclass(slots=True)
class Way:
    """What has passed in one direction. ``waited`` is the time that packets took in all, ``late``
    how much later than they should they arrived; ``last`` when the last one came in and went out.
    """

    bytes: int = 0
    packets: int = 0
    waited: float = 0.0
    late: list[float] = field(default_factory=list)
    last: tuple[float, float] = (0.0, 0.0)


class ShapedLink:
    """Listens at ``port`` while it is entered, and passes on what comes to ``host`` and ``target``;
    what is lost, and how late the others are, is drawn from ``seed``."""

    def __init__(self, host: str, target: int, shape: LinkShape, seed: int = 0) -> None:
        self.port = 0
        self.up, self.down = Way(), Way()
        self.answers: list[float] = []  # seconds from the last byte up to the first one down
        self._host, self._target = host, target
        self._shape = shape
        self._chance = random.Random(seed)
        self._connections: set[asyncio.Task[None]] = set()
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    async def __aenter__(self) -> ShapedLink:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def reset(self) -> None:
        """Nothing has passed yet."""
        self.up, self.down, self.answers = Way(), Way(), []

    def cut(self, share: float = 1.0) -> int:
        """Ends connections at once, each as likely as ``share``, in the midst of whatever is on its
        way; how many."""
        chosen = [each for each in self._open if self._chance.random() < share]
        for ends in chosen:
            for writer in ends:
                writer.transport.abort()
        return len(chosen)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection(self._host, self._target)
            self._open.add((writer, back))
            try:
                await asyncio.gather(
                    self._pass_on(reader, back, up=True), self._pass_on(there, writer, up=False)
                )
            finally:
                self._open.discard((writer, back))
                writer.transport.abort()
                back.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        packets: asyncio.Queue[tuple[float, float, bytes]] = asyncio.Queue()
        sending = asyncio.ensure_future(self._deliver(packets.get, writer, up=up))
        free = arrival = 0.0
        shape = self._shape
        try:
            while packet := await reader.read(PACKET_BYTES):
                now = time.perf_counter()
                way = self.up if up else self.down
                if not up and self.up.last[1] > way.last[0]:
                    self.answers.append(now - self.up.last[1])
                way.last = (now, way.last[1])
                free = max(free, now) + 8 * len(packet) / shape.bits_per_second
                delay = shape.delay + shape.jitter * self._chance.uniform(-1, 1)
                if self._chance.random() < shape.loss:
                    delay += 2 * shape.delay + RETRANSMIT_SECONDS
                arrival = max(arrival, free + max(0.0, delay))
                packets.put_nowait((now, arrival, packet))
            packets.put_nowait((0.0, arrival, b""))
            await sending
        finally:
            sending.cancel()

    async def _deliver(
        self,
        next_packet: Callable[[], Awaitable[tuple[float, float, bytes]]],
        writer: asyncio.StreamWriter,
        *,
        up: bool,
    ) -> None:
        while True:
            taken, arrival, packet = await next_packet()
            left = arrival - time.perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            if not packet:
                with suppress(OSError):
                    writer.write_eof()
                return
            now = time.perf_counter()
            way = self.up if up else self.down
            way.bytes += len(packet)
            way.packets += 1
            way.waited += now - taken
            way.late.append(now - arrival)
            way.last = (way.last[0], now)
            writer.write(packet)
