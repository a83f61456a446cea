"""Whom a death of the engine is counted against: what that engine had been asked for, no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.messages import (
    EngineStatistics,
    Request,
    SamplingParameters,
    SequenceEvent,
)
from lexshard.cluster.engine import supervisor
from lexshard.cluster.engine.journal import JournalStream
from lexshard.cluster.engine.supervisor import (
    FILES_CHANGED,
    NEVER_READY,
    NOT_STARTED_AGAIN,
    NOTHING_HEARD,
    STARTS_WAITED_FOR,
    EngineSupervisor,
)
from tests.support.engines_to_come import LOST, RAISED, EnginesToCome

PARAMETERS = SamplingParameters(max_tokens=9)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_PAUSE_SECONDS", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def client_of(engines: EnginesToCome) -> AsyncIterator[EngineSupervisor]:
    client = EngineSupervisor(EngineConfiguration("mock"), engines)
    client.start()
    try:
        await until(lambda: client.ready)
        yield client
    finally:
        await client.stop()


def ask(client: EngineSupervisor, name: str) -> JournalStream:
    return client.submit([Request(name, 0, (1, 2), PARAMETERS)])


async def ending(stream: JournalStream) -> tuple[SequenceEvent, list[int]]:
    """The last event of the one sequence of ``stream``, and all its tokens."""
    tokens: list[int] = []
    async with asyncio.timeout(10):
        while True:
            for event in await stream.arrived():
                tokens.extend(event.token_ids)
                if event.finish_reason is not None:
                    stream.close()
                    return event, tokens


async def died(engines: EnginesToCome, client: EngineSupervisor) -> None:
    """The engine that lives dies, and the next one is ready."""
    before = engines.started[-1]
    before.kill()
    await until(lambda: engines.started[-1] is not before and client.ready)


@pytest.mark.parametrize("failures", [[LOST], [RAISED, LOST], [OSError("no room")]])
def test_a_failed_start_is_no_second_death_of_what_survived_the_first(
    tmp_path: Path, failures: Sequence[Exception]
) -> None:
    async def scenario() -> None:
        engines = EnginesToCome(tmp_path, [None, *failures, None])
        async with client_of(engines) as client:
            stream = ask(client, "a")
            await stream.arrived()
            await died(engines, client)
            assert len(engines.started) == 2 + len(failures)
            last = engines.started[-1]
            await until(lambda: bool(last.asked))
            assert [request.resumed_ids for request in last.asked] == [(1,)]
            last.finish("a")
            event, tokens = await ending(stream)
            assert (event.finish_reason, event.error) == ("stop", None)
            assert tokens == [1, 2]

    asyncio.run(scenario())


def test_what_two_engines_died_with_is_not_handed_to_a_third(tmp_path: Path) -> None:
    """And what came after the first death has seen one."""

    async def scenario() -> None:
        engines = EnginesToCome(tmp_path, [None, LOST, None])
        async with client_of(engines) as client:
            suspect = ask(client, "suspect")
            await suspect.arrived()
            await died(engines, client)
            later = ask(client, "later")
            await until(lambda: len(engines.started[-1].asked) == 2)
            await died(engines, client)
            event, _ = await ending(suspect)
            assert event.error == "the engine died twice while serving this request"
            third = engines.started[-1]
            await until(lambda: bool(third.asked))
            assert [request.request_id for request in third.asked] == ["later"]
            third.finish("later")
            assert (await ending(later))[0].finish_reason == "stop"

    asyncio.run(scenario())


def test_what_no_engine_was_asked_for_has_seen_no_death(tmp_path: Path) -> None:
    """It comes while the next engine is being started, which fails."""

    async def scenario() -> None:
        engines = EnginesToCome(tmp_path, [None, LOST, LOST, None])
        async with client_of(engines) as client:
            engines.started[0].kill()
            await until(lambda: not client.ready)
            stream = ask(client, "a")
            await until(lambda: client.ready)
            await died(engines, client)
            await until(lambda: bool(engines.started[-1].asked))
            engines.started[-1].finish("a")
            assert (await ending(stream))[0].finish_reason == "stop"

    asyncio.run(scenario())


def test_what_an_engine_said_of_itself_is_not_told_after_its_death(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = EnginesToCome(tmp_path, [None, LOST, None])
        async with client_of(engines) as client:
            client.statistics = EngineStatistics(waiting=3)
            await died(engines, client)
            assert client.statistics is NOTHING_HEARD

    asyncio.run(scenario())


def test_nobody_waits_for_ever_for_an_engine_that_cannot_be_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = EnginesToCome(tmp_path, [None, RAISED])
        async with client_of(engines) as client:
            stream = ask(client, "a")
            await stream.arrived()
            engines.started[0].kill()
            event, _ = await ending(stream)
            assert (event.finish_reason, event.error) == ("error", NOT_STARTED_AGAIN)
            assert len(engines.started) >= 1 + STARTS_WAITED_FOR
            assert not client.ready

    asyncio.run(scenario())


def test_engines_that_all_die_before_one_is_ready_are_a_failure_until_one_is(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        failures: list[Exception | None] = [LOST]
        client = EngineSupervisor(EngineConfiguration("mock"), EnginesToCome(tmp_path, failures))
        client.start()
        await until(lambda: client.failure is not None)
        assert client.restarts == 1 + STARTS_WAITED_FOR
        event, _ = await ending(ask(client, "a"))
        assert (event.finish_reason, event.error) == ("error", NEVER_READY)
        failures.append(None)
        await until(lambda: client.ready)
        assert client.failure is None
        await client.stop()

    asyncio.run(scenario())


def test_an_engine_of_other_files_goes_on_with_no_text(tmp_path: Path) -> None:
    """They were changed in their place: half of a text would be another model's."""

    async def scenario() -> None:
        engines = EnginesToCome(tmp_path, [None])
        async with client_of(engines) as client:
            stream = ask(client, "a")
            client._information = replace(client.information, files="those of the first")
            engines.started[0].kill()
            assert (await ending(stream))[0].error == client.failure == FILES_CHANGED
            assert not client.ready
            engines.started[1].kill()

    asyncio.run(scenario())
