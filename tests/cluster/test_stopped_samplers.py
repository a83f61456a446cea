"""A sampler that is killed, or stopped (SIGSTOP), is replaced and its work done elsewhere; one that
is slow, starved or stopped for a moment is not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lexshard.actors.decision.local_samplers import InlineSampler
from lexshard.actors.decision.messages import DecisionWork
from lexshard.actors.decision.plane import DecisionPlane, SamplerHandle, SamplerLostError
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.states.deltas import Deltas
from lexshard.cluster.roles.stopped import LOOKS, StoppedProcess
from lexshard.cluster.samplers.process import SamplerProcess
from tests.support.processes import gone
from tests.support.quick import slow
from tests.support.sampler_processes import play, running, stand_in
from tests.support.sampler_stand_in import THOUGHTFUL_SECONDS
from tests.support.sampler_work import SETTINGS, SIZE, dense_rows

# A second of looks, and what a busy machine adds.
MOST_SECONDS = 10.0
ONE_ROW = dense_rows(np.random.default_rng(0), (0,))


@contextmanager
def noticed_in_time() -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(SamplerLostError, match="had been stopped"):
        yield
    assert 0.5 < time.monotonic() - started < MOST_SECONDS


def inline() -> SamplerHandle:
    return InlineSampler(Sampler(SETTINGS))


@pytest.mark.parametrize(
    ("number", "samplers"),
    [(signal.SIGKILL, 2), slow(signal.SIGSTOP, 1), slow(signal.SIGSTOP, 2)],
)
def test_a_sampler_lost_in_mid_step_changes_no_token(number: signal.Signals, samplers: int) -> None:
    expected = play(DecisionPlane(inline, 1, inline, SIZE))
    plane = DecisionPlane(lambda: SamplerProcess(SETTINGS), samplers, inline, SIZE)
    victim = next(iter(plane._handles.values()))
    assert isinstance(victim, SamplerProcess)
    assert play(plane, 10, number) == expected
    assert plane.counters.lost == 1
    assert plane.counters.wait < MOST_SECONDS
    assert gone(victim.process_id, 5)


@pytest.mark.slow
def test_samplers_that_are_all_stopped_change_no_token() -> None:
    """The one that takes over is stopped as well: then the engine's own process decides."""
    expected = play(DecisionPlane(inline, 1, inline, SIZE))
    plane = DecisionPlane(lambda: SamplerProcess(SETTINGS), 2, inline, SIZE)
    for handle in plane._handles.values():
        assert isinstance(handle, SamplerProcess)
        os.kill(handle.process_id, signal.SIGSTOP)
    assert play(plane) == expected
    assert plane.counters.lost == 2


@pytest.mark.slow
def test_whoever_waits_learns_of_it() -> None:
    """For a result, for a slot, for room in the socket, and for the sampler to start."""
    random = np.random.default_rng(0)
    more = dense_rows(random, tuple(range(8)))
    with running("stopping") as process:
        pending = process.submit(DecisionWork(0, Deltas(), None, None))
        with noticed_in_time():
            pending.result()
        assert gone(process.process_id, 5)
    with running("stopping", rows=1, slots=2) as process, noticed_in_time():
        process.submit(DecisionWork(0, Deltas(), None, more))
    with running("prompt") as process:
        os.kill(process.process_id, signal.SIGSTOP)
        long = Deltas(appended=((1, tuple(range(1_000_000))),))
        with noticed_in_time():
            process.submit(DecisionWork(0, long))
    started = time.monotonic()
    with pytest.raises(SamplerLostError, match="had been stopped"):
        SamplerProcess(SETTINGS, command=stand_in("stopped at birth"))
    assert time.monotonic() - started < 30.0


def test_a_stopped_sampler_is_closed_at_once() -> None:
    with running("prompt") as process:
        os.kill(process.process_id, signal.SIGSTOP)
        while not StoppedProcess(process.process_id).now():
            time.sleep(0.001)
        started = time.monotonic()
        process.close()
        assert time.monotonic() - started < 5
        assert gone(process.process_id, 5)


@pytest.mark.slow
def test_a_slow_sampler_is_waited_for() -> None:
    """Whatever it does for longer than a stopped one is given."""
    with running("thoughtful") as process:
        started = time.monotonic()
        result = process.submit(DecisionWork(0, Deltas(), None, ONE_ROW)).result()
        assert time.monotonic() - started > THOUGHTFUL_SECONDS
        assert len(result.decisions) == 1


@pytest.mark.slow
def test_a_sampler_that_goes_on_in_time_is_waited_for() -> None:
    """Stopped three times for half a second, which is too long only when put together."""
    with running("thoughtful") as process:
        pending = process.submit(DecisionWork(0, Deltas(), None, ONE_ROW))

        def interrupt() -> None:
            for _ in range(3):
                os.kill(process.process_id, signal.SIGSTOP)
                time.sleep(0.5)
                os.kill(process.process_id, signal.SIGCONT)
                time.sleep(0.25)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        assert len(pending.result().decisions) == 1
        interrupting.join()


def test_looks_must_follow_each_other() -> None:
    with running("prompt") as process:
        seen = StoppedProcess(process.process_id)
        assert not any(seen.look() for _ in range(2 * LOOKS))
        os.kill(process.process_id, signal.SIGSTOP)
        while not seen.now():
            time.sleep(0.001)
        assert [seen.look() for _ in range(LOOKS)] == [False] * (LOOKS - 1) + [True]
        seen.answered()
        assert [seen.look() for _ in range(LOOKS)] == [False] * (LOOKS - 1) + [True]
    assert not seen.now()
    assert not StoppedProcess(2**31 - 1).now()
