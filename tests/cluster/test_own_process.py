"""An engine in a plain process: who asks waits for one that answers."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.start import kernels_ahead
from lexshard.cluster.engine.handle import Suitability
from lexshard.cluster.engine.own_process import OwnEngine, answer_questions
from lexshard.cluster.engine.process import EngineProcess
from lexshard.cluster.link import PeerLostError

CONFIGURATION = EngineConfiguration(model="none")


class _Silent:
    """An engine's process of which nothing but its presence is asked."""


def dying(path: Path) -> socket.socket:
    """What is left of a process whose open files the system is just closing, one by one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def hang_up() -> None:
        taken, _ = listener.accept()
        taken.close()

    threading.Thread(target=hang_up, daemon=True).start()
    return listener


def test_a_process_that_is_dying_is_neither_the_engine_nor_another_death(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    engine = OwnEngine(str(path))
    process: Any = _Silent()

    async def ask() -> Suitability:
        with dying(path):
            asked = asyncio.ensure_future(engine.suits(CONFIGURATION))
            await asyncio.wait((asked,), timeout=0.2)
            assert not asked.done()
        answer_questions(process, str(path))
        return await asked

    assert asyncio.run(ask()) is Suitability.SUITABLE


def test_all_api_processes_may_ask_at_once_while_the_engine_imports(tmp_path: Path) -> None:
    """As after its death: none of them takes a full queue for another death."""
    path = tmp_path / "engine"
    process: Any = _Silent()

    async def ask() -> list[Suitability]:
        asked = [OwnEngine(str(path)).suits(CONFIGURATION) for _ in range(64)]
        running = asyncio.gather(*asked)
        await asyncio.sleep(0.1)
        answer_questions(process, str(path))
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:  # the accepting thread waits for the interpreter
            pass
        return await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == [Suitability.SUITABLE] * 64


def test_a_full_queue_is_no_death(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(0)
    others = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for each in others:
        each.setblocking(False)
        each.connect_ex(str(path))

    async def ask() -> None:
        await asyncio.wait_for(OwnEngine(str(path)).located(), 0.3)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(TimeoutError):
        runner.run(ask())
    for each in (*others, listener):
        each.close()


def test_the_end_of_a_process_that_had_answered_is_a_death(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def answer_once() -> None:
        taken, _ = listener.accept()
        taken.makefile().readline()
        taken.sendall(b'{"process_id": 4194305}\n')  # more than Linux gives any process
        taken.close()

    threading.Thread(target=answer_once, daemon=True).start()
    engine = OwnEngine(str(path))

    async def live() -> None:
        assert await engine.suits(CONFIGURATION) is Suitability.SUITABLE
        await engine.ended()

    with listener, pytest.raises(PeerLostError):
        asyncio.run(live())


def test_collections_of_garbage_leave_out_what_an_engine_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a million objects of torch and its like take 0.25 s, in which no stream goes on."""
    monkeypatch.setattr(kernels_ahead, "compile_kernels", lambda configuration, tell: {})
    try:
        EngineProcess.load(Mock(spec=EngineProcess, make=Mock()), CONFIGURATION)
        assert len(gc.get_objects()) < 10_000
        assert gc.get_freeze_count() > 100_000
    finally:
        gc.unfreeze()


def test_an_engine_is_made_though_nothing_reads_what_it_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server's output was a pipe to a script that has ended, or a terminal that was closed."""
    monkeypatch.setattr(kernels_ahead, "compile_kernels", lambda configuration, tell: {})
    monkeypatch.setattr(sys, "stdout", Mock(write=Mock(side_effect=BrokenPipeError)))
    engine = Mock(make=lambda _, tell: tell("loading the weights") or Mock())
    try:
        assert EngineProcess.load(engine, CONFIGURATION)
    finally:
        gc.unfreeze()
