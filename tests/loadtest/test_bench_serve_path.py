"""The load of `lexshard bench serve-path`: the same for a server and for the engine alone."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.text.codec import TextCodec
from lexshard.loadtest.bench.serve_path.client import follow
from lexshard.loadtest.bench.serve_path.engine_alone import Stream
from lexshard.loadtest.bench.serve_path.load import LONGEST_REST_SECONDS, Load, RequestTimes
from tests.support.mock_engine import MockEngine, Script
from tests.support.mock_server import listening
from tests.support.paths import ROOT


@given(st.integers(0, 300), st.integers(1, 20), st.integers(4, 512))
def test_staggered_responses_have_drawn_lengths_and_those_in_lockstep_one(
    stream: int, left: int, tokens: int
) -> None:
    assert Load(1, 1, tokens).output_tokens(stream, left) == tokens
    drawn = Load(1, 1, tokens, staggered=True).output_tokens(stream, left)
    assert tokens // 2 <= drawn <= tokens * 3 // 2
    assert drawn >= 2
    assert drawn == Load(9, 9, tokens, staggered=True).output_tokens(stream, left)


def test_staggered_streams_end_at_different_moments() -> None:
    load = Load(32, 1, 64, staggered=True)
    assert len({load.output_tokens(stream, 1) for stream in range(32)}) > 16


def test_only_staggered_streams_rest_before_they_ask() -> None:
    staggered, lockstep = Load(32, 1, 64, staggered=True), Load(32, 1, 64)
    rests = [staggered.rest_seconds(stream, 1) for stream in range(32)]
    assert len(set(rests)) == 32
    assert all(0 <= rest <= LONGEST_REST_SECONDS for rest in rests)
    assert {lockstep.rest_seconds(stream, 1) for stream in range(32)} == {0.0}


def test_no_two_prompts_of_a_load_begin_alike() -> None:
    load = Load(256, 12, 64)
    beginnings = [load.prompt(s, left)[:12] for s, left in product(range(256), range(1, 13))]
    assert len(set(beginnings)) == len(beginnings)


@pytest.mark.parametrize("staggered", [False, True])
def test_a_server_is_asked_what_the_engine_alone_is_asked(staggered: bool) -> None:
    load = Load(streams=3, rounds=4, tokens=8, staggered=staggered)
    engine = MockEngine(script=lambda _: Script([[97]] * 12, seconds_per_step=0.001))
    with listening(engine) as url:
        result = asyncio.run(follow(url, "mock", load))
    asked = {bytes(r.prompt_ids).decode(): r.parameters.max_tokens for r in engine.requests}
    codec = TextCodec.load(str(ROOT / "models" / "lexshard-demo"))
    assert codec is not None
    wanted = {}
    for index in range(load.streams):
        stream = Stream(index, load, codec)
        for left in range(load.rounds, 0, -1):
            assert stream.rest_seconds() == load.rest_seconds(index, left)
            request = stream.next_request(due=0.0)
            assert request.prompt_ids == tuple(codec.encode(load.prompt(index, left)))
            wanted[load.prompt(index, left)] = request.parameters.max_tokens
        assert stream.rest_seconds() is None
    assert asked == wanted
    assert result.tokens == sum(wanted.values())
    assert len(result.first_token_seconds) == len(result.per_token_seconds) == 12
    # Not less than a step takes, but where this process hears of several at once.
    assert all(0.0 < seconds < 1.0 for seconds in result.per_token_seconds)


def test_times_are_told_by_request() -> None:
    times = RequestTimes()
    for asked, heard, tokens in ((10.0, (12.0, 13.0, 16.0), 5), (20.0, (21.0,), 1)):
        times.ask(asked)
        assert not times.answered
        for now in heard:
            times.hear(now)
        times.end(tokens)
    assert times.first_token_seconds == [2.0, 1.0]
    assert times.between_seconds == [1.0, 3.0]
    assert times.per_token_seconds == [1.0]
