"""Clients take turns at what compiles grammars: one that asks for much waits for itself alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lexshard.serve_app.openai.errors import ApiError, ClientDisconnectedError
from lexshard.serve_app.structured.turns import FairWorker


class Desk:
    """Work that notes its name when it is done; the first piece lasts until all others wait."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.worker = FairWorker(max_waiting_bytes=100)
        self._opened = threading.Event()

    def asked(self, name: str, receive: Callable[[], Any], size: int = 10) -> asyncio.Task[None]:
        work = self.worker.run(name[0], size, lambda: self._work(name), receive)
        return asyncio.ensure_future(work)

    def _work(self, name: str) -> None:
        self._opened.wait()
        self.done.append(name)

    async def finish(self, tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
        for _ in range(10):  # until they wait, or have left
            await asyncio.sleep(0)
        self._opened.set()
        return await asyncio.gather(*tasks, return_exceptions=True)


def test_between_two_grammars_of_a_client_comes_one_of_every_other() -> None:
    async def run() -> None:
        desk, never = Desk(), asyncio.Event()
        names = ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]
        await desk.finish([desk.asked(name, never.wait) for name in names])
        assert desk.done == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        await desk.asked("d1", never.wait)
        assert desk.done[-1] == "d1"

    asyncio.run(run())


def test_a_client_that_leaves_loses_its_turn_and_no_other() -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def run() -> None:
        desk, never = Desk(), asyncio.Event()
        tasks = [
            desk.asked(name, gone if name == "b1" else never.wait) for name in ("a1", "b1", "a2")
        ]
        _, left, _ = await desk.finish(tasks)
        assert isinstance(left, ClientDisconnectedError)
        assert desk.done == ["a1", "a2"]

    asyncio.run(run())


def test_only_the_client_that_has_too_many_is_refused() -> None:
    async def run() -> None:
        desk, never = Desk(), asyncio.Event()
        tasks = [desk.asked(name, never.wait, size=60) for name in ("a1", "a2", "b1")]
        _, refused, _ = await desk.finish(tasks)
        assert isinstance(refused, ApiError)
        assert refused.status == 503
        assert desk.done == ["a1", "b1"]
        await desk.asked("a3", never.wait, size=200)  # alone, it may be larger

    asyncio.run(run())


@pytest.mark.parametrize("fault", [ValueError, ClientDisconnectedError])
def test_work_that_fails_hands_the_turn_on(fault: type[Exception]) -> None:
    async def run() -> None:
        desk, never = Desk(), asyncio.Event()

        def fail() -> None:
            raise fault

        failing = asyncio.ensure_future(desk.worker.run("a", 10, fail, never.wait))
        failed, _ = await desk.finish([failing, desk.asked("b1", never.wait)])
        assert isinstance(failed, fault)
        assert desk.done == ["b1"]

    asyncio.run(run())
