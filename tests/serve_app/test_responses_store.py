"""Where responses are kept: what is bounded, who finds what, and that processes share it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.responses import store as stores
from lexshard.serve_app.responses.store import ResponseStore, StoreLimits

ITEMS = [{"id": "msg_1", "type": "message", "role": "user", "content": "x"}]


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
        await store.put("a", response("r"), ITEMS)
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
        await store.put("a", response("1"), ITEMS)
        await store.put("a", response("2", "1"), ITEMS)
        await store.put("a", response("3", "2"), ITEMS)
        await store.put("a", response("other", "1"), ITEMS)
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
            await store.put("a", response(str(number), previous), ITEMS)
        assert await store.chain_bytes("a", "1") > 0
        with pytest.raises(ApiError, match="2 responses at most"):
            await store.chain_bytes("a", "2")

    using(test)


def test_the_longest_unused_is_forgotten_first() -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), [])
        await store.put("a", response("2"), [])
        assert await kept(store, "1") == ["1"]
        await store.put("a", response("3"), [])
        assert await kept(store, "1", "2", "3") == ["1", "3"]

    times = iter(range(100))
    using(test, limits=StoreLimits(responses=2), clock=lambda: next(times))


def test_bytes_are_bounded_and_who_has_most_loses_first() -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("b", response("mine"), [])
        for number in range(5):
            await store.put("a", response(str(number), size=300), [])
        assert await kept(store, "mine", owner="b") == ["mine"]
        assert await kept(store, "0", "1", "2", "3", "4") == ["3", "4"]
        await store.put("a", response("large", size=2000), [])
        assert await kept(store, "large", "4") == ["4"]

    using(test, limits=StoreLimits(bytes=1000))


def test_what_is_old_is_forgotten() -> None:
    now = [0.0]

    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), [])
        now[0] = 9.0
        assert await kept(store, "1") == ["1"]
        now[0] = 20.0
        assert await kept(store, "1") == []

    using(test, limits=StoreLimits(age_seconds=10), clock=lambda: now[0])


def test_a_store_that_fails_says_try_again_and_loses_no_reply(tmp_path: Path) -> None:
    async def test(store: ResponseStore) -> None:
        await store.put("a", response("1"), [])
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
        "        await store.put('a', told, [])\n"
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
