"""Where responses are kept: what is bounded, who finds what, and that processes share it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.responses import store as stores
from lexshard.serve_app.responses.store import ResponseStore, StoreLimits

ITEMS = [{"id": "msg_1", "type": "message", "role": "user", "content": "x"}]
READ = orjson.dumps(ITEMS)
NONE = b"[]"


def response(name: str, previous: str | None = None, size: int = 0) -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "output": ["x" * size]}


def using(
    test: Callable[[ResponseStore], Awaitable[Any]], folder: Path | None = None, **options: Any
) -> Any:
    async def run() -> Any:
        store = ResponseStore(folder, **options)
        try:
            return await test(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def kept(store: ResponseStore, *names: str, owner: str = "a") -> list[str]:
    return [name for name in names if await store.get(owner, name) is not None]


def test_what_was_put_is_found_by_its_owner_alone_until_it_is_deleted() -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("a", response("r"), READ)
        found = await store.get("a", "r")
        assert found is not None
        assert (found.response, found.items) == (response("r"), ITEMS)
        assert await store.get("b", "r") is None
        assert not await store.delete("b", "r")
        with pytest.raises(ApiError, match="not found"):
            await store.chain("b", "r")
        assert await store.delete("a", "r")
        assert not await store.delete("a", "r")
        assert await store.get("a", "r") is None

    using(test)


def test_a_chain_is_all_that_a_response_followed() -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), READ)
        await store.put("a", response("2", "1"), READ)
        await store.put("a", response("3", "2"), READ)
        await store.put("a", response("other", "1"), READ)
        chain = await store.chain("a", "3")
        assert [each.response["id"] for each in chain] == ["1", "2", "3"]
        told = sum(
            len(orjson.dumps(part)) for each in chain for part in (each.response, each.items)
        )
        assert await store.chain_bytes("a", "3") == told
        await store.delete("a", "2")
        for name in ("3", "2"):
            with pytest.raises(ApiError) as told:
                await store.chain("a", name)
            assert (told.value.status, told.value.code) == (400, "previous_response_not_found")

    using(test)


def test_a_chain_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_CHAIN", 2)

    async def test(store: ResponseStore) -> None:
        for number in range(3):
            previous = str(number - 1) if number else None
            await store.put("a", response(str(number), previous), READ)
        assert await store.chain_bytes("a", "1") > 0
        with pytest.raises(ApiError, match="2 responses at most"):
            await store.chain_bytes("a", "2")

    using(test)


def test_the_longest_unused_is_forgotten_first() -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), NONE)
        await store.put("a", response("2"), NONE)
        assert await kept(store, "1") == ["1"]
        await store.put("a", response("3"), NONE)
        assert await kept(store, "1", "2", "3") == ["1", "3"]

    times = iter(range(100))
    using(test, limits=StoreLimits(responses=2), clock=lambda: next(times))


def test_bytes_are_bounded_and_who_has_most_loses_first() -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("b", response("mine"), NONE)
        for number in range(5):
            await store.put("a", response(str(number), size=300), NONE)
        assert await kept(store, "mine", owner="b") == ["mine"]
        assert await kept(store, "0", "1", "2", "3", "4") == ["3", "4"]
        await store.put("a", response("large", size=2000), NONE)
        assert await kept(store, "large", "4") == ["4"]

    using(test, limits=StoreLimits(bytes=1000))


@dataclass
class PlainStore:
    """Which responses are kept, by owner and id with when each was used last and its bytes: what is
    over the bounds goes one by one, and is looked for anew each time."""

    limits: StoreLimits
    rows: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)

    def put(self, owner: str, name: str, now: float, size: int) -> None:
        self.rows[owner, name] = now, size
        oldest = now - self.limits.age_seconds
        self.rows = {key: row for key, row in self.rows.items() if row[0] >= oldest}
        while len(self.rows) > self.limits.responses or self._bytes() > self.limits.bytes:
            owners = sorted({owner for owner, _ in self.rows})
            most = max(owners, key=self._bytes)
            del self.rows[min((*row, key) for key, row in self.rows.items() if key[0] == most)[2]]

    def use(self, owner: str, name: str, now: float) -> None:
        if (owner, name) in self.rows:
            self.rows[owner, name] = now, self.rows[owner, name][1]

    def _bytes(self, owner: str | None = None) -> int:
        own = (row[1] for key, row in self.rows.items() if owner in (None, key[0]))
        return sum(own)


@pytest.mark.parametrize("seed", range(6))
def test_who_loses_what_is_decided_for_each_response_anew(seed: int) -> None:
    draw = random.Random(seed)
    limits = StoreLimits(draw.choice((3, 8, 20)), draw.choice((400, 1500, 4000)), 40)
    now, plain = [0.0], PlainStore(limits)

    async def test(store: ResponseStore) -> None:
        for number in map(str, draw.sample(range(60), 60)):
            now[0] += draw.choice((0, 0, 1, 5))  # what is used at one moment is told by its bytes
            owner, told = draw.choice("abc"), response(number, size=draw.choice((0, 9, 90, 300)))
            await store.put(owner, told, NONE)
            known = {*plain.rows, (owner, number)}
            plain.put(owner, number, now[0], len(orjson.dumps(told)) + len(NONE))
            for again in draw.sample(sorted(plain.rows), draw.randrange(3) % (len(plain.rows) + 1)):
                await store.get(*again)
                plain.use(*again, now[0])
            there = {each for each in known if await store.chain_bytes(*each)}
            assert there == plain.rows.keys()

    using(test, limits=limits, clock=lambda: now[0])


def test_room_for_one_response_is_made_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loses hundreds for it held the lock for seconds, and every reply waited."""
    opened, steps = stores._opened, [0]

    def count() -> None:
        steps[0] += 1

    def counted(path: str) -> sqlite3.Connection:
        connection = opened(path)
        connection.set_progress_handler(count, 100)
        return connection

    monkeypatch.setattr(stores, "_opened", counted)

    async def test(store: ResponseStore) -> None:
        for number in range(300):
            await store.put("a", response(f"{number:03}"), NONE)
        before = steps[0]
        await store.put("a", response("large", size=14_000), NONE)
        assert await kept(store, "large", "150", "299") == ["large", "299"]
        assert steps[0] - before < 500

    using(test, limits=StoreLimits(bytes=18_000))


def test_what_is_old_is_forgotten() -> None:
    now = [0.0]

    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), NONE)
        now[0] = 9.0
        assert await kept(store, "1") == ["1"]
        now[0] = 20.0
        assert not await store.delete("a", "1")
        assert await kept(store, "1") == []

    using(test, limits=StoreLimits(age_seconds=10), clock=lambda: now[0])


def test_a_store_that_fails_says_try_again_and_loses_no_reply(tmp_path: Path) -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), NONE)
        with pytest.raises(ApiError) as told:
            await store.get("a", "1")
        assert told.value.status == 503

    (tmp_path / stores.FILE_NAME).write_text("no database")
    using(test, tmp_path)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """All of them make the file at the same moment."""
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from lexshard.serve_app.responses.store import ResponseStore\n"
        "store = ResponseStore(Path(sys.argv[1]))\n"
        "async def run():\n"
        "    for i in range(20):\n"
        "        told = {'id': f'{sys.argv[2]}-{i}', 'previous_response_id': None}\n"
        "        await store.put('a', told, b'[]')\n"
        "asyncio.run(run())\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, tmp_path, str(number)])
        for number in range(3)
    ]
    assert [each.wait(60) for each in running] == [0, 0, 0]

    async def test(store: ResponseStore) -> None:
        names = [f"{number}-{i}" for number in range(3) for i in range(20)]
        assert await kept(store, *names) == names

    using(test, tmp_path)
