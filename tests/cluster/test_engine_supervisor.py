"""The engine in its own process, through real Ray: streams, cancellation, death and replay."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.messages import Commands, Request, SamplingParameters
from tests.support.paths import DEMO, DEMO_DRAFT

CONFIGURATION = EngineConfiguration(str(DEMO), device="cpu", threads=1)
DRAFTING = replace(CONFIGURATION, draft=str(DEMO_DRAFT), draft_length="stepping")
LONG = SamplingParameters(temperature=0.9, seed=4, max_tokens=1000, ignore_eos=True)
MEDIUM = replace(LONG, max_tokens=500)
SHORT = SamplingParameters(temperature=0.9, seed=4, max_tokens=30, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("local_ray")


def supervisor(configuration: EngineConfiguration) -> Any:
    from lexshard.cluster.engine.ray_actor import RayEngines
    from lexshard.cluster.engine.supervisor import EngineSupervisor

    return EngineSupervisor(configuration, RayEngines())


@asynccontextmanager
async def running_client(configuration: EngineConfiguration = CONFIGURATION) -> AsyncIterator[Any]:
    client = supervisor(configuration)
    client.start()
    try:
        await _until(lambda: client.ready or client.failure is not None, 120)
        yield client
    finally:
        await client.stop()


async def _until(condition: Any, seconds: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "waited too long"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def _collect(stream: Any, sequences: int = 1) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while sequences:
        for event in await stream.arrived():
            assert event.error is None, event.error
            tokens.setdefault(event.choice, []).extend(event.token_ids)
            sequences -= event.finish_reason is not None
    return tokens


@pytest.mark.slow
def test_streams_and_cancels_across_processes() -> None:
    """With an engine that was begun before anybody wanted it, and is found."""
    from lexshard.cluster.engine.ray_actor import RayEngines

    async def scenario() -> None:
        begun = RayEngines().start(CONFIGURATION)
        begun.begin()
        async with running_client() as client:
            information = client.information
            located = await begun.located()
            assert located is not None
            assert located.information.process_id == information.process_id
            assert client.restarts == 0
            assert information.process_id != os.getpid()
            assert information.batch_invariant
            requests = [Request("two", choice, (5, 6, 7), SHORT) for choice in range(2)]
            tokens = await _collect(client.submit(requests), 2)
            assert [len(tokens[choice]) for choice in range(2)] == [30, 30]
            assert tokens[0] != tokens[1]
            stream = client.submit([Request("gone", 0, (5, 6, 7), LONG)])
            await stream.arrived()
            stream.close()
            await _until(lambda: client.statistics.cancelled == 1, 5)
            assert client.statistics.running == 0
            assert client.statistics.kv_blocks_used == 0

    asyncio.run(scenario())


@pytest.mark.slow  # tests.serve_app.test_serving_demo kills one under streams every time
@pytest.mark.parametrize("configuration", [CONFIGURATION, DRAFTING])
def test_killing_the_engine_loses_no_stream_and_changes_no_token(
    configuration: EngineConfiguration,
) -> None:
    """kill -9 in mid-stream, in the midst of drafts too: a new engine takes over and the text goes
    on as if nothing was."""

    async def scenario() -> None:
        async with running_client(configuration) as client:
            requests = [Request(f"k{i}", 0, (9, 8, 7, i), LONG) for i in range(3)]
            expected = await asyncio.gather(*(_collect(client.submit([r])) for r in requests))
            victim = client.information.process_id
            tasks = [asyncio.create_task(_collect(client.submit([r]))) for r in requests]
            await _until(lambda: client.statistics.running == 3, 10)
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in tasks)
            os.kill(victim, signal.SIGKILL)
            await _until(lambda: not client.ready, 10)
            recovery = await _until(lambda: client.ready, 60)
            print(f"engine back {recovery:.1f} s after its death")
            assert await asyncio.gather(*tasks) == expected
            assert client.information.process_id != victim

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_a_model_that_cannot_be_served_says_why(begun: bool) -> None:
    """Also where the engine has failed before anybody asked."""
    from lexshard.cluster.engine.ray_actor import RayEngines

    async def scenario() -> None:
        nowhere = EngineConfiguration("/nonexistent/model")
        if begun:
            RayEngines().start(nowhere).begin()
        async with running_client(nowhere) as client:
            assert client.failure is not None
            assert "/nonexistent/model" in client.health_reason
            stream = client.submit([Request("x", 0, (1,), SHORT)])
            [event] = await stream.arrived()
            assert event.finish_reason == "error"

    asyncio.run(scenario())


@pytest.mark.slow
def test_clients_share_an_engine_and_one_that_is_lost_takes_its_own_sequences_alone() -> None:
    """What an API process that is killed leaves behind: sequences without a client, an engine that
    goes on with the others, and that ends with the last of them. One that has only lost its
    connection connects again."""

    async def scenario() -> None:
        from lexshard.cluster.engine.transport import ClientSide

        def text(client: Any, name: str) -> Any:
            return _collect(client.submit([Request(name, 0, (5, 6, 7), MEDIUM)]))

        async with running_client() as first:
            expected = await text(first, "a")
            location = await first._engine.located()
            lost = await ClientSide.connect(location.path, lambda output: None)
            lost.send(Commands(submit=(Request("lost", 0, (5, 6, 7), MEDIUM),)))
            going = asyncio.create_task(text(first, "b"))
            await _until(lambda: first.statistics.running == 2, 10)
            lost.close()
            assert await going == expected
            await _until(lambda: first.statistics.cancelled == 1, 5)
            assert first.statistics.running == 0

            second = supervisor(CONFIGURATION)
            second.start()
            found = await _until(lambda: second.ready, 10)
            print(f"found after {found:.1f} s")
            assert second.information.process_id == first.information.process_id
            interrupted = asyncio.create_task(text(second, "c"))
            await _until(lambda: second.statistics.running == 1, 10)
            second._side.close()
            assert await interrupted == expected
            assert first.restarts == second.restarts == 0
            await second.stop()
            assert first.ready
            assert await text(first, "d") == expected

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_engine_of_another_configuration_is_left_to_those_it_serves() -> None:
    """Whoever wants another one waits, says so, and starts it when the first has ended."""

    async def scenario() -> None:
        from lexshard.cluster.engine.supervisor import OCCUPIED

        second = supervisor(replace(CONFIGURATION, max_model_len=256))
        try:
            async with running_client() as first:
                process_id = first.information.process_id
                second.start()
                await _until(lambda: second.health_reason is OCCUPIED, 20)
                await asyncio.sleep(2)
                assert first.ready
                assert first.information.process_id == process_id
                assert first.restarts == 0
                await _collect(first.submit([Request("a", 0, (5, 6, 7), SHORT)]))
            await _until(lambda: second.ready, 120)
            assert second.information.process_id != process_id
            assert second.information.max_model_len == 256
            assert second.restarts == 0
        finally:
            await second.stop()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_deserted_engine_of_another_configuration_is_replaced() -> None:
    """All that used it were killed, and the server begins again with other options."""

    async def scenario() -> None:

        async with running_client() as first:
            process_id = first.information.process_id
            first._supervision.cancel()
            first._side.close()
            second = supervisor(replace(CONFIGURATION, max_model_len=256))
            second.start()
            try:
                await _until(lambda: second.ready, 120)
                assert second.information.process_id != process_id
            finally:
                await second.stop()

    asyncio.run(scenario())
