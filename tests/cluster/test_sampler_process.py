"""A sampler in a process of its own: the same tokens, and no death goes unnoticed or leaves a
trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lexshard.actors.decision.local_samplers import InlineSampler
from lexshard.actors.decision.messages import (
    DecisionResult,
    DecisionWork,
    DenseRows,
    SamplerSettings,
)
from lexshard.actors.decision.plane import SamplerLostError
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.states.deltas import NO_DELTAS, Deltas
from lexshard.actors.states.row_table import RowNames
from lexshard.cluster.samplers.dense_slots import slot_bytes
from lexshard.cluster.samplers.main import SamplerServer
from lexshard.cluster.samplers.messages import Assignment, SamplerOrder
from lexshard.cluster.samplers.process import SamplerProcess
from tests.support.paths import ROOT
from tests.support.processes import gone, holders
from tests.support.sampler_processes import running, stand_in
from tests.support.sampler_stand_in import SLOW_SECONDS
from tests.support.sampler_work import (
    SETTINGS,
    SIZE,
    candidate_rows,
    comparable,
    decides_as_one_here,
    dense_rows,
    opened,
)


@pytest.fixture(scope="module")
def process() -> Iterator[SamplerProcess]:
    with running(rows=3, slots=2) as started:
        yield started


def lost_within(seconds: float, what: object) -> None:
    started = time.monotonic()
    with pytest.raises(SamplerLostError):
        what()  # type: ignore[operator]
    assert time.monotonic() - started < seconds


# -- the same decisions ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 8, 13])
def test_its_decisions_are_those_of_a_sampler_in_this_process(
    process: SamplerProcess, count: int
) -> None:
    """In fewer rows at a time than there are."""
    decides_as_one_here(process, count)


def test_what_has_happened_is_heard_once_a_step() -> None:
    """With the first of the slots that its rows fill."""
    told: list[Deltas] = []

    def decide(work: DecisionWork) -> DecisionResult:
        told.append(work.deltas)
        return DecisionResult(work.step, (None,), 0.0)

    slot = np.zeros(slot_bytes(SIZE, 1), np.uint8)
    ring: Any = SimpleNamespace(take=lambda: slot, release=lambda: None)
    order = SamplerOrder(SETTINGS, rows=1, slots=1, link=0, ring=(0, 0))
    server = SamplerServer(SimpleNamespace(decide=decide), ring, order)
    server.answer(Assignment(0, Deltas(closed=(7,)), None, RowNames((0, 1, 2))))
    assert told[0] == Deltas(closed=(7,))
    assert all(each is NO_DELTAS for each in told[1:])  # which no sampler looks into
    assert len(told) == 3


def test_several_threads_decide_the_same() -> None:
    random = np.random.default_rng(5)
    sequences = tuple(range(7))
    work = DecisionWork(
        0,
        Deltas(opened=opened(0, 7)),
        candidate_rows(random, sequences),
        dense_rows(random, sequences),
    )
    expected = InlineSampler(Sampler(SETTINGS)).submit(work).result()
    process = SamplerProcess(SamplerSettings(SIZE, (0, 3), threads=2))
    assert comparable(process.submit(work).result()) == comparable(expected)
    process.close()


def test_steps_may_be_submitted_ahead_and_results_taken_in_any_order(
    process: SamplerProcess,
) -> None:
    random = np.random.default_rng(2)
    inline = InlineSampler(Sampler(SETTINGS))
    sequences = tuple(range(4))
    deltas = Deltas(opened=opened(0, 4))
    pending, expected = [], []
    for step in range(20):
        work = DecisionWork(step, deltas, None, dense_rows(random, sequences))
        pending.append(process.submit(work))
        expected.append(comparable(inline.submit(work).result()))
        deltas = Deltas(appended=((step % 4, (step,)),))
    order = random.permutation(20).tolist()
    assert [comparable(pending[i].result()) for i in order] == [expected[i] for i in order]
    assert comparable(pending[3].result()) == expected[3]
    process.submit(DecisionWork(20, Deltas(closed=sequences))).result()


def test_thousands_of_results_nobody_has_taken_block_nobody() -> None:
    """Far more answers than a socket holds, and dense rows in between that need free slots."""
    random = np.random.default_rng(3)
    sequences = tuple(range(40))
    with running("prompt", rows=8, slots=2) as process:
        candidates = candidate_rows(random, sequences)
        dense = dense_rows(random, sequences[:9])
        pending = [
            process.submit(DecisionWork(i, Deltas(), candidates, dense if i % 50 == 0 else None))
            for i in range(1_500)
        ]
        lengths = [len(each.result().decisions) for each in pending]
        assert lengths == [49 if i % 50 == 0 else 40 for i in range(1_500)]


def test_long_histories_pass_through_the_socket(process: SamplerProcess) -> None:
    """Megabytes in one message, which both sides' buffers are far too small for."""
    long = opened(0, 20, prompt=32_000)
    random = np.random.default_rng(4)
    work = DecisionWork(0, Deltas(opened=long), candidate_rows(random, tuple(range(20))))
    expected = InlineSampler(Sampler(SETTINGS)).submit(work).result()
    assert comparable(process.submit(work).result()) == comparable(expected)
    process.submit(DecisionWork(1, Deltas(closed=tuple(range(20))))).result()


# -- back-pressure --------------------------------------------------------------------------------


def test_submitting_waits_only_while_the_ring_is_full() -> None:
    random = np.random.default_rng(0)
    dense = dense_rows(random, (0, 1))
    with running("slow", rows=2, slots=3) as process:
        started = time.monotonic()
        pending = [process.submit(DecisionWork(i, Deltas(), None, dense)) for i in range(3)]
        assert time.monotonic() - started < SLOW_SECONDS / 2
        pending.append(process.submit(DecisionWork(3, Deltas(), None, dense)))  # a slot first
        assert time.monotonic() - started > SLOW_SECONDS / 2
        best = tuple(dense.logits.argmax(axis=1).tolist())
        for each in pending:
            result = each.result()
            assert tuple(d.token_id for d in result.decisions if d is not None) == best


# -- errors ---------------------------------------------------------------------------------------


def test_what_the_sampler_raises_comes_back_and_the_next_step_is_decided() -> None:
    """Also the slots of the dense rows that were not decided come back."""
    random = np.random.default_rng(0)
    dense = dense_rows(random, tuple(range(5)))
    with running("prompt", rows=2, slots=2) as process:
        for _ in range(3):
            bad_value = process.submit(DecisionWork(0, Deltas(closed=(1,)), None, dense))
            fault = process.submit(DecisionWork(1, Deltas(closed=(2,)), None, dense))
            good = process.submit(DecisionWork(2, Deltas(), None, dense))
            with pytest.raises(ValueError, match="this cannot be asked"):
                bad_value.result()
            with pytest.raises(RuntimeError, match=r"sampler_stand_in[\s\S]*a fault of ours"):
                fault.result()
            assert len(good.result().decisions) == 5


def test_dense_rows_of_another_vocabulary_are_refused(process: SamplerProcess) -> None:
    rows = DenseRows(RowNames((0,)), np.zeros((1, SIZE + 1), np.float32))
    with pytest.raises(ValueError, match=r"\(1, 1000\) expected"):
        process.submit(DecisionWork(0, Deltas(), None, rows))
    assert process.submit(DecisionWork(1, Deltas())).result().decisions == ()


@pytest.mark.slow
def test_a_sampler_that_cannot_start_says_why() -> None:
    with pytest.raises(ValueError, match="no such hot vocabulary"), running("unmakeable"):
        pass
    with pytest.raises(SamplerLostError, match="code -9"), running("stillborn"):
        pass


# -- deaths ---------------------------------------------------------------------------------------


def test_kill_9_of_the_sampler_ends_every_wait() -> None:
    """What is pending, what is submitted later, and a submission that waits for a slot."""
    random = np.random.default_rng(0)
    dense, more = dense_rows(random, (0, 1)), dense_rows(random, tuple(range(4)))
    with running("slow", rows=1, slots=2) as process:
        done = process.submit(DecisionWork(0, Deltas(), None, dense))
        assert len(done.result().decisions) == 2
        pending = [process.submit(DecisionWork(1, Deltas(), None, None)) for _ in range(3)]
        killing = threading.Timer(0.05, os.kill, (process.process_id, signal.SIGKILL))
        killing.start()
        lost_within(5, lambda: process.submit(DecisionWork(2, Deltas(), None, more)))
        for each in pending:
            lost_within(5, each.result)
        lost_within(5, lambda: process.submit(DecisionWork(3, Deltas())))
        assert len(done.result().decisions) == 2
        assert gone(process.process_id, 5)


def test_closing_loses_what_is_pending() -> None:
    with running("slow") as process:
        pending = process.submit(DecisionWork(0, Deltas()))
        process.close()
        lost_within(5, pending.result)
        process.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc to look for leaks")
def test_kill_9_of_the_owner_ends_the_sampler_and_leaves_nothing() -> None:
    script = (
        "import os, sys, time, numpy as np\n"
        "from lexshard.actors.decision.messages import *\n"
        "from lexshard.cluster.samplers.process import SamplerProcess\n"
        f"process = SamplerProcess(SamplerSettings({SIZE}, ()), slots=2, rows=1,\n"
        f"    command={stand_in('slow')!r})\n"
        f"dense = DenseRows(RowNames((0,)), np.zeros((1, {SIZE}), np.float32))\n"
        "inode = os.fstat(process._ring._segment.descriptor).st_ino\n"
        "print(process.process_id, inode, flush=True)\n"
        "for step in range(1000): process.submit(DecisionWork(step, Deltas(), None, dense))\n"
    )
    owner = subprocess.Popen(
        (sys.executable, "-c", script), stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout is not None
    child, inode = map(int, owner.stdout.readline().split())
    assert set(holders(inode)) == {owner.pid, child}
    time.sleep(0.3)  # it waits for a slot now
    owner.kill()
    owner.wait()
    assert gone(child, 5)
    assert holders(inode) == []


def test_an_interrupt_is_the_owners_to_handle(process: SamplerProcess) -> None:
    os.kill(process.process_id, signal.SIGINT)
    assert process.submit(DecisionWork(0, Deltas())).result().decisions == ()
    assert os.getpgid(process.process_id) != os.getpgid(0)


def test_the_child_loads_neither_torch_nor_ray_nor_http() -> None:
    script = (
        "import sys, lexshard.cluster.samplers.main\n"
        "print({'torch', 'ray', 'fastapi', 'pydantic', 'transformers'} & set(sys.modules))"
    )
    printed = subprocess.check_output((sys.executable, "-c", script), cwd=ROOT, text=True)
    assert printed.strip() == "set()"
