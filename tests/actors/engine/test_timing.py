"""Where the time of a sequence and of a step went, as the engine counts it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lexshard.actors.collective import Traffic
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.head.sequence_head import ShardCounters
from lexshard.actors.messages import STEP_SECONDS, Request, SamplingParameters, SequenceEvent
from tests.support.demo_engine import demo_engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = demo_engine(head="dense")
    yield engine
    engine.close()


def test_the_first_and_the_last_event_tell_the_time_before_the_first_token(engine: Engine) -> None:
    parameters = SamplingParameters(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.submit(Request("a", 0, (5, 6, 7), parameters))
    time.sleep(0.05)
    events: list[SequenceEvent] = []
    started = time.perf_counter()
    while not events:
        events += engine.step()
    prefill = time.perf_counter() - started
    while events[-1].finish_reason is None:
        events += engine.step()
    assert not any(event.timing for event in events[1:-1])
    first, last = events[0].timing, events[-1].timing
    assert first is not None
    assert last is not None
    assert first.queued >= 0.05
    assert 0 < first.prefill <= prefill
    assert (last.queued, last.prefill) == (first.queued, first.prefill)
    assert (last.verify, last.exchange) == (0.0, 0.0)  # no drafter, and one shard


def test_every_step_is_observed_once_in_every_phase(engine: Engine) -> None:
    before = engine.statistics()
    parameters = SamplingParameters(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.generate([(5, 6, 7)], parameters)
    told = engine.statistics()
    steps = told.steps - before.steps
    for phase, seconds in (
        ("body", told.body_seconds),
        ("head", told.head_seconds),
        ("decide", told.decide_seconds),
    ):
        *counts, total = told.step_seconds[phase]
        assert len(counts) == len(STEP_SECONDS) + 1
        assert sum(counts) - sum(before.step_seconds[phase][:-1]) == steps
        assert total == pytest.approx(seconds)
    assert sum(told.step_seconds["exchange"]) == 0
    assert told.finished_prompt_tokens - before.finished_prompt_tokens == 3


def test_a_time_is_counted_under_the_first_bound_that_is_not_below_it() -> None:
    counters = Counters()
    for seconds in (0.0, STEP_SECONDS[0], STEP_SECONDS[1], 1000.0):
        counters.observe("body", seconds)
    *counts, total = counters.step_seconds["body"]
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert total == pytest.approx(1000.0 + STEP_SECONDS[0] + STEP_SECONDS[1])


def test_what_a_lost_group_exchanged_stays_counted() -> None:
    later = Traffic(calls=1, bytes_sent=10, bytes_received=3, microseconds=5e5)
    later.go_on_from(Traffic(calls=2, bytes_sent=20, bytes_received=4, microseconds=1e6))
    assert (later.calls, later.bytes_sent, later.bytes_received) == (3, 30, 7)
    assert ShardCounters(traffic={"gather": later}).exchange_seconds == pytest.approx(1.5)
