"""What is told of an engine that is silent, and of sequences whose engine has died."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.messages import Drafts, Request, SamplingParameters, SequenceEvent
from lexshard.cluster.engine import pulse as heartbeat
from lexshard.cluster.engine.journal import Journal, JournalStream
from lexshard.cluster.engine.own_process import OwnEngines
from lexshard.cluster.engine.pulse import QUIET_SECONDS, Pulse
from lexshard.cluster.engine.supervisor import SHUTTING_DOWN, EngineSupervisor
from lexshard.cluster.link import PeerLostError

REQUEST = Request("a", 0, (1, 2), SamplingParameters(max_tokens=9))


def entered(journal: Journal, request: Request) -> JournalStream:
    stream = JournalStream([request.request_id], lambda _: None)
    journal.enter([request], stream)
    return stream


def test_a_new_engine_is_asked_to_go_on_where_each_stream_stopped() -> None:
    journal = Journal()
    stream = entered(journal, REQUEST)
    journal.record([SequenceEvent("a", 0, (7,)), SequenceEvent("unknown", 0, (1,))])
    journal.count_death()
    journal.record([SequenceEvent("a", 0, (8, 9))])
    [again] = journal.continuations()
    assert again.resumed_ids == (7, 8, 9)
    assert [event.token_ids for event in asyncio.run(stream.arrived())] == [(7,), (8, 9)]


def test_a_text_that_went_on_behind_another_one_does_so_again() -> None:
    """A device's, whose link was lost before: its server asked for the rest alone."""
    journal = Journal()
    entered(journal, replace(REQUEST, resumed_ids=(3, 4)))
    journal.record([SequenceEvent("a", 0, (7,))])
    guesses = Drafts("a", 0, 5, (8,), number=1)
    assert journal.note_drafts(guesses)
    [again] = journal.continuations()
    assert again.resumed_ids == (3, 4, 7)
    assert journal.drafts() == [guesses]


def test_a_new_engine_is_told_how_far_a_text_goes_on_alone() -> None:
    """Of what a device has asked for, the rest; then what has come since."""
    journal = Journal()
    entered(journal, REQUEST)
    first, second = Drafts("a", 0, 3, (7, 8), alone=4, number=1), Drafts("a", 0, 6, number=2)
    assert journal.note_drafts(first)
    journal.record([SequenceEvent("a", 0, (6,)), SequenceEvent("a", 0, (7, 9, 5), answers=1)])
    assert journal.note_drafts(second)
    # One guess stood: 9, and four tokens behind it, of which one has come.
    assert journal.drafts() == [Drafts("a", 0, 6, alone=2, number=1), second]
    journal.record([SequenceEvent("a", 0, (5, 5, 5))])
    assert journal.drafts() == [second]


def test_a_new_engine_is_told_no_guesses_that_are_built_on_one_that_fell() -> None:
    """But those behind them, which began with what the text says."""
    journal = Journal()
    entered(journal, REQUEST)
    length = len(REQUEST.prompt_ids)
    first = Drafts("a", 0, length, (7, 8), number=1)
    built = Drafts("a", 0, length + 2, (9,), number=2, ahead=True)
    fresh = Drafts("a", 0, length + 2, (9,), number=3)
    for guesses in (first, built, fresh):
        assert journal.note_drafts(guesses)
    journal.record([SequenceEvent("a", 0, (7, 6), answers=1)])
    assert journal.drafts() == [fresh]


def test_a_stop_gives_streams_their_time_and_then_tells_them() -> None:
    async def scenario() -> None:
        client = EngineSupervisor(EngineConfiguration("none"), OwnEngines("nowhere"))
        ends, goes_on = (client.submit([Request(n, 0, (1,), SamplingParameters())]) for n in "ab")
        started = time.monotonic()
        stopping = asyncio.ensure_future(client.stop(0.5))
        await asyncio.sleep(0.1)
        assert client.health_reason == SHUTTING_DOWN
        client._journal.record([SequenceEvent("a", 0, (5,), finish_reason="stop")])
        late = client.submit([Request("c", 0, (1,), SamplingParameters())])
        for stream, reason in ((ends, "stop"), (late, "abort"), (goes_on, "abort")):
            [event] = await stream.arrived()
            assert event.finish_reason == reason
            stream.close()
        await stopping
        assert 0.4 < time.monotonic() - started < 10

    asyncio.run(scenario())


@pytest.mark.parametrize("work", ["while True: pass", "import time; time.sleep(60)"])
def test_silence_is_told_of_a_process_that_does_not_compute_and_of_no_other(work: str) -> None:
    """A long step says nothing either."""
    process = subprocess.Popen([sys.executable, "-c", work])
    try:
        pulse = Pulse(process.pid)
        if "while" in work:
            assert not looked_silent(pulse, QUIET_SECONDS + 1)
            process.send_signal(signal.SIGSTOP)
        assert looked_silent(pulse, 6)
        if "while" in work:
            assert pulse.idleness < pulse.silence  # it was seen to compute
        pulse.heard()
        assert not pulse.look()
    finally:
        process.kill()
        process.wait()


def test_what_an_api_process_slept_through_is_no_silence_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped itself, and would kill the engine that others are served by."""
    with pytest.raises(TimeoutError):
        watch(monkeypatch, [0.5, 100.0, 0.5])
    with pytest.raises(PeerLostError, match="no word from the engine for 6"):
        watch(monkeypatch, [0.5] * 200)


def watch(monkeypatch: pytest.MonkeyPatch, passing: Sequence[float]) -> None:
    """Of an engine that says nothing, with so many seconds from look to look."""
    now, left = [1000.0], iter(passing)

    async def sleep(_: float) -> None:
        passed = next(left, None)
        if passed is None:
            raise TimeoutError
        now[0] += passed

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    client = EngineSupervisor(EngineConfiguration("m"), OwnEngines("nowhere"))
    asyncio.run(client._watch(Pulse(os.getpid())))


def looked_silent(pulse: Pulse, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if pulse.look():
            return True
    return False
