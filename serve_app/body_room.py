"""Room for the bodies of requests: how many bytes of them are held before they are understood, and
how much of JSON is too much."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from lexshard.serve_app.openai.errors import ApiError, overloaded, rate_limited

LEAST_TOTAL = 64 * 1024 * 1024
# HAProxy hands over what is shorter in one piece, so no client can keep it half sent: not counted.
SHORT_BODY = 16 * 1024
# That an announced body waits, unread, before it is refused: uploads on a good line take less.
ROOM_SECONDS = 5.0
# Of a whole body, at every depth: values take up to 24 times the memory of their JSON, and names
# ten times the time of numbers.
MAX_JSON_VALUES = 1_000_000
MAX_JSON_NAMES = 100_000
NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{,:'))
PIECE_BYTES = 1 << 20


def holds_too_much(body: bytes) -> bool:
    """Whether JSON has too many values or names: counts what comes before those (brackets, braces
    and commas) and after these (colons)."""
    if len(body) <= MAX_JSON_NAMES:
        return False
    values = sum(map(body.count, (b"[", b"{", b",")))
    if values <= MAX_JSON_VALUES and body.count(b":") <= MAX_JSON_NAMES:
        return False  # even with those inside strings
    # Once escapes are gone, every quote begins or ends a string; two side by side change nothing.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    rest = rest.translate(None, NO_STRUCTURE).replace(b'""', b"")
    values = names = inside = 0
    for begin in range(0, len(rest), PIECE_BYTES):
        parts = rest[begin : begin + PIECE_BYTES].split(b'"')
        outside = b"".join(parts[inside::2])
        names += outside.count(b":")
        values += len(outside) - outside.count(b":")
        if values > MAX_JSON_VALUES or names > MAX_JSON_NAMES:
            return True
        inside ^= (len(parts) - 1) % 2
    return False


class BodyRoom:
    """What one API process holds of bodies that are arriving, or have not been parsed yet: room for
    four of the largest, at least `LEAST_TOTAL`, and half of that for one client.

    A client that announces a length gets all of it at once, or waits holding nothing; so no
    two bodies that have half arrived wait for each other. Without one it takes room as it comes.
    """

    def __init__(self, largest: int) -> None:
        self.total = max(LEAST_TOTAL, 4 * largest)
        self.share = self.total // 2
        self.held = 0
        self._of_client: dict[str, int] = {}
        self._freed = asyncio.Event()

    @contextmanager
    def body(self, client: str) -> Iterator[HeldBody]:
        """One body of ``client``, which leaves the room with the ``with``."""
        held = HeldBody(self, client)
        try:
            yield held
        finally:
            held.release()

    async def freed(self) -> None:
        """Until a body has left."""
        await self._freed.wait()

    def refusal(self, client: str, size: int) -> ApiError | None:
        """Why ``size`` more bytes of ``client`` do not fit; None where they do."""
        own = self._of_client.get(client, 0)
        if own + size > self.share:
            return rate_limited(
                f"{own} bytes of your request bodies are arriving, of the {self.share} that one "
                "client may send at once; try again"
            )
        if self.held + size > self.total:
            return overloaded(f"{self.held} bytes of request bodies are arriving; try again")
        return None

    def add(self, client: str, size: int) -> None:
        """``size`` more bytes, or less than before where it is negative."""
        self.held += size
        self._of_client[client] = self._of_client.get(client, 0) + size
        if not self._of_client[client]:
            del self._of_client[client]
        if size < 0:
            self._freed.set()
            self._freed = asyncio.Event()


class HeldBody:
    """The room that one body has; see `BodyRoom`."""

    def __init__(self, room: BodyRoom, client: str) -> None:
        self._room = room
        self._client = client
        self._size = 0

    async def announce(self, size: int) -> None:
        """Room for a body of ``size`` bytes, waited for where there is none.

        Raises:
            ApiError: 429 where this client's other bodies take its share, 503 where those of all
                take the whole room, for `ROOM_SECONDS`.
        """
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while self._refusal(size):
                    await self._room.freed()
        except TimeoutError:
            pass
        self.cover(size)

    def cover(self, size: int) -> None:
        """Room for the ``size`` bytes that have come so far.

        Raises:
            ApiError: as `announce`, at once.
        """
        if refusal := self._refusal(size):
            raise refusal
        if size > max(SHORT_BODY, self._size):
            self._room.add(self._client, size - self._size)
            self._size = size

    def release(self) -> None:
        """Nothing of it is held any more; twice does no harm."""
        if self._size:
            self._room.add(self._client, -self._size)
            self._size = 0

    def _refusal(self, size: int) -> ApiError | None:
        if size <= max(SHORT_BODY, self._size):
            return None
        return self._room.refusal(self._client, size - self._size)
