"""API processes and the engine: whole messages, to whom they concern, and word of a loss."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.messages import (
    Commands,
    DraftDistribution,
    Drafting,
    Drafts,
    EngineStatistics,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from lexshard.cluster.engine import submissions, transport
from lexshard.cluster.engine.transport import ClientSide, EngineSide
from lexshard.cluster.link import Link

Heard = list[StepOutput]


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400)))
def test_messages_come_whole_however_the_stream_is_cut(
    contents: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(len(each).to_bytes(4, "little") + each for each in contents)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    here, there = socket.socketpair()
    link, arrived = Link(there), []
    for begin, end in pairwise(edges):
        here.sendall(stream[begin:end])
        arrived += link.arrived()
    assert arrived == contents
    here.close()
    link.close()


LISTS = st.lists(st.integers(0, 9), max_size=3).map(tuple)
ASKED = st.builds(
    Request,
    st.sampled_from(["a", "b"]),
    st.integers(0, 3),
    LISTS,
    st.builds(
        SamplingParameters,
        seed=st.integers(0, 2**63),
        bad_words=st.lists(LISTS, max_size=2).map(tuple),
        allowed_ids=LISTS | st.none(),
        logit_bias=st.sampled_from([(), ((3, 1.5),)]),
        stop_token_ids=LISTS,
    ),
    resumed_ids=LISTS,
    drafting=st.sampled_from([Drafting(), Drafting("client", "same-distribution", 3)]),
)
DRAFTS = st.sampled_from(
    [
        Drafts("a", 0, 7),
        Drafts("a", 1, 7, (4, 5)),
        Drafts("b", 0, 7, (4,), (DraftDistribution((4, 9), (0.5, -1e9)),)),
    ]
)


@given(
    st.lists(ASKED, max_size=4),
    st.lists(st.text(max_size=3), max_size=2),
    st.booleans(),
    st.lists(DRAFTS, max_size=3),
)
def test_what_is_asked_arrives(
    asked: list[Request], cancelled: list[str], stop: bool, drafts: list[Drafts]
) -> None:
    commands = Commands((*asked, *asked), tuple(cancelled), stop, tuple(drafts))
    assert submissions.decode(submissions.encode(commands)) == commands


def test_what_choices_share_travels_once_and_is_shared_on_arrival() -> None:
    parameters = SamplingParameters(allowed_ids=tuple(range(16_000)))
    prompt = tuple(range(5000))
    other = replace(parameters, seed=7)  # of the next prompt of a batch
    requests = [Request("a", n, prompt, parameters) for n in range(100)]
    next_prompt = prompt[::-1]
    requests += [Request("b", n, next_prompt, other) for n in range(28)]
    content = submissions.encode(Commands(submit=tuple(requests)))
    assert len(content) < 3 * (16_000 + 2 * 5000) + 128 * 40
    arrived = submissions.decode(content).submit
    assert arrived == tuple(requests)
    assert len({id(each.prompt_ids) for each in arrived}) == 2
    assert len({id(each.parameters) for each in arrived}) == 2
    assert len({id(each.parameters.allowed_ids) for each in arrived}) == 1


def request(name: str, choice: int = 0) -> Request:
    return Request(name, choice, (1, 2), SamplingParameters())


@contextmanager
def engine_side() -> Iterator[tuple[EngineSide, str]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "engine"
        side = EngineSide(path)
        try:
            yield side, str(path)
        finally:
            side.close()


async def connected(path: str) -> tuple[ClientSide, Heard]:
    heard: Heard = []
    return await ClientSide.connect(path, heard.append), heard


async def received(side: EngineSide) -> Commands:
    """The next commands; the event loop, in which clients live, goes on meanwhile."""
    async with asyncio.timeout(5):
        while (commands := side.receive(0.0)) is None:
            await asyncio.sleep(0.001)
        return commands


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def play(scenario: Callable[[EngineSide, str], Awaitable[None]]) -> None:
    with engine_side() as (side, path):
        uvloop.run(scenario(side, path))  # as in Serve's replica


def test_what_happens_to_a_sequence_is_told_to_whom_it_concerns_and_counts_to_all() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        (first, heard_first), (second, heard_second) = await connected(path), await connected(path)
        first.send(Commands(submit=(request("a"), request("both", 0), request("both", 1))))
        second.send(Commands(submit=(request("b"),)))
        await received(side)
        await received(side)
        a, b = SequenceEvent("a", 0, (5,)), SequenceEvent("b", 0, (6,), finish_reason="stop")
        one, other = (SequenceEvent("both", n, (7,), finish_reason="stop") for n in (0, 1))
        side.emit(StepOutput((a, b, one)))
        side.emit(StepOutput((other, SequenceEvent("b", 0, (9,)))))  # b has ended
        side.emit(StepOutput((a,), EngineStatistics(steps=3)))
        await until(lambda: len(heard_first) == 3 and len(heard_second) == 2)
        assert [each.events for each in heard_first] == [(a, one), (other,), (a,)]
        assert [each.events for each in heard_second] == [(b,), ()]
        for heard in (heard_first, heard_second):
            assert heard[-1].statistics == EngineStatistics(steps=3)
        first.close()
        second.close()

    play(scenario)


def test_a_request_leaves_before_the_event_loop_turns_to_the_next() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        client, _ = await connected(path)
        side.receive(0.0)  # takes the connection
        client.send(Commands(submit=(request("a"),)))
        assert side.receive(0.0) == Commands(submit=(request("a"),))  # nothing was awaited
        client.close()

    play(scenario)


def test_what_an_engine_does_not_read_yet_waits_and_arrives_whole_and_in_order() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        client, _ = await connected(path)
        prompt = tuple(range(100_000))
        sent = [replace(request(str(number)), prompt_ids=prompt) for number in range(20)]
        for each in sent:  # more than the system holds
            client.send(Commands(submit=(each,)))
        assert [await received(side) for _ in sent] == [Commands(submit=(each,)) for each in sent]
        client.close()

    play(scenario)


def test_what_a_lost_process_has_asked_for_is_cancelled_and_the_others_go_on() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        (first, _), (second, heard) = await connected(path), await connected(path)
        first.send(Commands(submit=(request("ended"), request("open"))))
        second.send(Commands(submit=(request("b"),)))
        await received(side)
        await received(side)
        side.emit(StepOutput((SequenceEvent("ended", 0, (1,), finish_reason="length"),)))
        first.close()
        assert await received(side) == Commands(cancel=("open",))
        side.emit(StepOutput((SequenceEvent("open", 0, (3,)), SequenceEvent("b", 0, (4,)))))
        await until(lambda: bool(heard))
        assert [event.request_id for event in heard[0].events] == ["b"]
        second.close()

    play(scenario)


def test_a_report_that_is_read_does_not_wake_an_engine_at_rest() -> None:
    """Else each report has the next one made: a whole core for nothing."""

    async def scenario(side: EngineSide, path: str) -> None:
        client, heard = await connected(path)
        side.receive(0.0)  # takes the connection
        began = time.monotonic()
        for reports in range(1, 4):
            side.emit(StepOutput((), EngineStatistics()))
            rest = asyncio.create_task(asyncio.to_thread(side.receive, 0.3))
            await until(lambda wanted=reports: len(heard) == wanted)
            assert await rest is None
        assert time.monotonic() - began >= 3 * 0.3
        client.close()

    play(scenario)


def test_a_command_ends_a_rest_at_once_and_so_does_a_process_that_is_lost() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        client, _ = await connected(path)
        side.receive(0.0)
        rest = asyncio.create_task(asyncio.to_thread(side.receive, 60.0))
        await asyncio.sleep(0.05)
        client.send(Commands(submit=(request("a"),)))
        assert await asyncio.wait_for(rest, 5) == Commands(submit=(request("a"),))
        rest = asyncio.create_task(asyncio.to_thread(side.receive, 60.0))
        client.close()
        assert await asyncio.wait_for(rest, 5) == Commands(cancel=("a",))

    play(scenario)


def test_an_engine_is_told_to_stop_by_the_last_who_leaves_on_purpose() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        (first, _), (second, _) = await connected(path), await connected(path)
        first.send(Commands(submit=(request("a"),)))
        assert (await received(side)).submit
        first.send(Commands(stop=True))
        assert await received(side) == Commands(cancel=("a",))
        await first.lost
        second.send(Commands(stop=True))
        assert (await received(side)).stop

    play(scenario)


def test_an_engine_knows_how_long_nobody_was_with_it() -> None:
    async def scenario(side: EngineSide, path: str) -> None:
        await asyncio.sleep(0.05)
        assert side.deserted_seconds > 0.01
        (first, _), (second, _) = await connected(path), await connected(path)
        first.send(Commands(submit=(request("a"),)))
        second.send(Commands(submit=(request("b"),)))
        await received(side)
        await received(side)
        first.close()
        await received(side)
        assert side.deserted_seconds == 0
        second.close()
        left = time.monotonic()
        await received(side)
        assert 0 < side.deserted_seconds <= time.monotonic() - left

    play(scenario)


def test_a_process_that_does_not_read_holds_nobody_up_and_is_given_up(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Messages larger than the system holds for it wait in the engine, and not without limit."""
    monkeypatch.setattr(transport, "MAX_UNREAD_BYTES", 8 * 1024 * 1024)
    large = SequenceEvent("a", 0, tuple(range(100_000)))

    async def scenario(side: EngineSide, path: str) -> None:
        (stuck, heard), (reads, heard_by_other) = await connected(path), await connected(path)
        stuck.send(Commands(submit=(request("a"),)))
        reads.send(Commands(submit=(request("b"),)))
        await received(side)
        await received(side)
        started = time.monotonic()
        side.emit(StepOutput((large, SequenceEvent("b", 0, (1,)))))
        side.emit(StepOutput((large,)))
        assert time.monotonic() - started < 10
        await until(lambda: side.receive(0.0) is None and len(heard) == 2)  # reads again: no loss
        assert heard[1].events == (large,)
        assert heard_by_other[0].events == (SequenceEvent("b", 0, (1,)),)
        asyncio.get_running_loop().remove_reader(stuck._link)
        for _ in range(30):
            side.emit(StepOutput((large,)))
        assert await received(side) == Commands(cancel=("a",))
        side.emit(StepOutput((SequenceEvent("b", 0, (2,)),)))
        await until(lambda: len(heard_by_other) == 2)
        reads.close()

    play(scenario)
