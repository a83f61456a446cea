"""Responses that were answered, so that later requests may refer to them: bounded, in one file that
all API processes of a server share, or with one process that keeps them for all replicas."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from lexshard.serve_app.openai.errors import bad_request, overloaded, shortened

logger = logging.getLogger("lexshard.http")

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 1024 * 1024
MAX_AGE_SECONDS = 24 * 3600
# A conversation that is continued from the kept responses has at most so many of them.
MAX_CHAIN = 1024
BUSY_SECONDS = 5.0  # for other processes to end what they write
PAUSE_SECONDS = 0.02
PREVIOUS = "previous_response_id"
FILE_NAME = "responses.sqlite"
IN_MEMORY = ":memory:"
Returned = TypeVar("Returned")

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    previous TEXT,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL,
    response BLOB NOT NULL,
    items BLOB NOT NULL,
    PRIMARY KEY (owner, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used, bytes);
"""
# What of an owner goes first; `by_owner` has it in this order.
OLDEST = "SELECT id, bytes FROM responses WHERE owner = ? ORDER BY used, bytes, id"
# A response and those that it followed, the last one first.
CHAIN = """
WITH RECURSIVE chain (id, previous, bytes, depth) AS (
    SELECT id, previous, bytes, 0 FROM responses
    WHERE owner = :owner AND id = :id AND used >= :oldest
    UNION ALL
    SELECT each.id, each.previous, each.bytes, depth + 1 FROM responses AS each
    JOIN chain ON each.id = chain.previous AND each.owner = :owner WHERE depth < :most
)
SELECT id, previous, bytes FROM chain ORDER BY depth
"""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What is over one of them is forgotten, the longest unused first; of the owner who has most of
    it where there are too many responses or bytes."""

    responses: int = MAX_RESPONSES
    bytes: int = MAX_BYTES
    age_seconds: float = MAX_AGE_SECONDS


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the items of its own request, each with an ``id``."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """The responses in a file of ``folder``, or in this process alone where that is None.

    Nothing is read, written or waited for on the event loop: a thread does it. An ``owner`` finds
    what it has stored itself; empty is the owner where there are no keys. ``clock`` tells seconds
    that processes agree on. ``shared`` calls a method of another such store, which has them all.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: StoreLimits = StoreLimits(),
        clock: Callable[[], float] = time.time,
        shared: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        self._path = IN_MEMORY if folder is None else str(folder / FILE_NAME)
        self._limits = limits
        self._clock = clock
        self._shared = shared
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._opened: sqlite3.Connection | None = None

    async def put(self, owner: str, response: dict[str, Any], items: bytes) -> None:
        """Keeps a response and the ``items`` of its request, as JSON; where that cannot be, the log
        says so, and the client who refers to it is told that there is none."""
        told = await self._in_thread(orjson.dumps, response)
        try:
            await self._run(self._put, owner, response["id"], response[PREVIOUS], told, items)
        except (sqlite3.Error, ConnectionError) as error:
            logger.warning("response %s is not kept: %s", response["id"], error)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Raises:
        ApiError: 503 where the file cannot be read.
        """
        return await self._found(self._get, owner, response_id)

    async def chain_bytes(self, owner: str, response_id: str) -> int:
        """How much `chain` would read.

        Raises:
            ApiError: 400 for more than `MAX_CHAIN` responses; 503 where the file cannot be read.
        """
        links = await self._found(self._links, owner, response_id, MAX_CHAIN)
        if len(links) > MAX_CHAIN:
            told = f"'{PREVIOUS}': {MAX_CHAIN} responses at most can be gone on with"
            raise bad_request(told, PREVIOUS)
        return sum(size for _, _, size in links)

    async def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """The response and all those that it followed, the first one first.

        Raises:
            ApiError: 400 where one of them is not kept; 503 where the file cannot be read.
        """
        chain = await self._found(self._chain, owner, response_id)
        if not chain:
            raise bad_request(
                f"Previous response with id '{shortened(response_id)}' not found, or one that it "
                "followed",
                PREVIOUS,
                "previous_response_not_found",
            )
        return chain

    async def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one.

        Raises:
            ApiError: 503 where the file cannot be written.
        """
        return await self._found(self._delete, owner, response_id) > 0

    async def close(self) -> None:
        await self._in_thread(self._close)
        self._thread.shutdown()

    async def _found(self, work: Callable[..., Returned], *arguments: Any) -> Returned:
        try:
            return await self._run(work, *arguments)
        except (sqlite3.Error, ConnectionError) as error:
            logger.warning("the store of responses fails: %s", error)
            raise overloaded("the store of responses does not answer; try again") from error

    async def _run(self, work: Callable[..., Returned], *arguments: Any) -> Returned:
        if self._shared is None:
            return await self._in_thread(work, *arguments)
        return await self._shared(work.__name__, *arguments)

    async def _in_thread(self, work: Callable[..., Returned], *arguments: Any) -> Returned:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- in the thread ----------------------------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            deadline = time.monotonic() + BUSY_SECONDS
            while self._opened is None:
                try:
                    self._opened = _opened(self._path)
                except sqlite3.OperationalError:  # another process is just making the file
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(PAUSE_SECONDS)
        return self._opened

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _put(self, owner: str, name: str, previous: str | None, told: bytes, read: bytes) -> None:
        size = len(told) + len(read)
        if size > self._limits.bytes:
            raise sqlite3.DataError(f"{size} bytes are more than {self._limits.bytes}")
        row = (name, owner, previous, self._clock(), size, told, read)
        connection = self._connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._forget(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _forget(self, connection: sqlite3.Connection) -> None:
        oldest = self._clock() - self._limits.age_seconds
        connection.execute("DELETE FROM responses WHERE used < ?", (oldest,))
        told = connection.execute("SELECT count(*), total(bytes) FROM responses").fetchone()
        count, size = told
        if count > self._limits.responses or size > self._limits.bytes:
            gone = self._too_much(connection, count, size)
            connection.executemany("DELETE FROM responses WHERE owner = ? AND id = ?", gone)

    def _too_much(
        self, connection: sqlite3.Connection, count: int, size: float
    ) -> list[tuple[str, str]]:
        """Owner and id of those that go, of ``count`` responses with ``size`` bytes. They are found
        without looking through all of them for each: who waits for the lock waits for that."""
        totals = connection.execute("SELECT total(bytes), owner FROM responses GROUP BY owner")
        owners = [(-total, owner) for total, owner in totals]  # who has most is the least
        heapify(owners)
        oldest: dict[str, sqlite3.Cursor] = {}
        gone: list[tuple[str, str]] = []
        while count > self._limits.responses or size > self._limits.bytes:
            total, owner = owners[0]
            if owner not in oldest:
                oldest[owner] = connection.execute(OLDEST, (owner,))
            name, own = next(oldest[owner])
            gone.append((owner, name))
            heapreplace(owners, (total + own, owner))
            count, size = count - 1, size - own
        return gone

    def _links(self, owner: str, response_id: str, most: int) -> list[tuple[str, str | None, int]]:
        """Id, predecessor and bytes of a response and of ``most`` that it followed, the last one
        first."""
        oldest = self._clock() - self._limits.age_seconds
        asked = {"owner": owner, "id": response_id, "oldest": oldest, "most": most}
        return self._connection().execute(CHAIN, asked).fetchall()

    def _read(self, owner: str, response_ids: list[str]) -> list[StoredResponse]:
        """They are used now. One that has been forgotten meanwhile is left out."""
        connection, now = self._connection(), self._clock()
        connection.executemany(
            "UPDATE responses SET used = ? WHERE owner = ? AND id = ?",
            [(now, owner, response_id) for response_id in response_ids],
        )
        query = "SELECT response, items FROM responses WHERE owner = ? AND id = ?"
        found = [connection.execute(query, (owner, each)).fetchone() for each in response_ids]
        return [StoredResponse(*map(orjson.loads, row)) for row in found if row is not None]

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        links = self._links(owner, response_id, 0)
        return next(iter(self._read(owner, [link[0] for link in links])), None)

    def _delete(self, owner: str, response_id: str) -> int:
        query = "DELETE FROM responses WHERE owner = ? AND id = ? AND used >= ?"
        oldest = self._clock() - self._limits.age_seconds
        return self._connection().execute(query, (owner, response_id, oldest)).rowcount

    def _chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """None at all where one of them is not kept."""
        links = self._links(owner, response_id, MAX_CHAIN)
        chain = self._read(owner, [link[0] for link in reversed(links)])
        whole = links and links[-1][1] is None and len(chain) == len(links)
        return chain if whole else []


def _opened(path: str) -> sqlite3.Connection:
    opened = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None)
    try:
        # The file ends with the server: nothing in it has to outlive the machine.
        opened.execute("PRAGMA synchronous = OFF")
        opened.execute("PRAGMA auto_vacuum = FULL")
        opened.execute("PRAGMA journal_mode = WAL")
        opened.executescript(SCHEMA)
    except BaseException:
        opened.close()
        raise
    return opened
