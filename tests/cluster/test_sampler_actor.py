"""A sampler as a Ray actor decides what one in this process does, and its death is noticed."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from lexshard.actors.decision.messages import DecisionWork
from lexshard.actors.decision.plane import SamplerLostError
from lexshard.actors.states.deltas import Deltas
from tests.support.processes import gone
from tests.support.sampler_work import SETTINGS, decides_as_one_here, dense_rows, opened

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def test_its_decisions_are_those_of_a_sampler_in_this_process() -> None:
    """Small rows that travel inside the message, and large ones through the object store."""
    from lexshard.cluster.samplers.actor import RemoteSampler

    actor = RemoteSampler(SETTINGS, Event())
    for count in (1, 2, 80):
        decides_as_one_here(actor, count)
    with pytest.raises(KeyError):
        actor.submit(DecisionWork(9, Deltas(closed=(1,)))).result()
    actor.close()


def test_kill_9_of_the_actor_ends_every_wait() -> None:
    from lexshard.cluster.samplers.actor import RemoteSampler

    actor = RemoteSampler(SETTINGS, Event())
    rows = dense_rows(np.random.default_rng(0), (0,))
    pending = [
        actor.submit(DecisionWork(0, Deltas(opened=opened(0, 1)), None, rows)) for _ in range(50)
    ]
    os.kill(actor.process_id, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(SamplerLostError):
        [each.result() for each in pending]
    with pytest.raises(SamplerLostError):
        actor.submit(DecisionWork(1, Deltas())).result()
    assert time.monotonic() - started < 30
    actor.close()
    actor.close()


def test_a_stopped_actor_is_killed_where_it_is_waited_for_or_closed() -> None:
    from lexshard.cluster.samplers.actor import RemoteSampler

    waited, closed = RemoteSampler(SETTINGS, Event()), RemoteSampler(SETTINGS, Event())
    for actor in (waited, closed):
        os.kill(actor.process_id, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(SamplerLostError):
        waited.submit(DecisionWork(0, Deltas())).result()
    assert time.monotonic() - started < 20
    assert gone(waited.process_id, 5)
    closed.close()
    assert gone(closed.process_id, 5)


def test_one_that_finds_no_room_is_given_up_when_nobody_wants_it_any_more() -> None:
    """A thread that still waited for it while Ray is left could end the process."""
    from lexshard.cluster.samplers.actor import RemoteSampler

    closing = Event()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(RemoteSampler, SETTINGS, closing, num_cpus=100_000)
        time.sleep(1)
        assert not coming.done()
        closing.set()
        with pytest.raises(SamplerLostError, match="was not ready"):
            coming.result(2)
