"""Processes stopped and killed at random moments of steps: no wrong answer, no long wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import CollectiveError, CollectiveLostError
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from tests.support.shard_process import ShardProcesses, shard_processes
from tests.support.sharded_cases import HeadCase, drawn, hidden_states

pytestmark = pytest.mark.slow
CASE = HeadCase(3, screens=("int8",), size=20_000, seed=1)
SECONDS = 1.0
NEEDS = [
    Need("top1"),
    Need("topk", k=50, key=5, position=3, inverse_temperature=1.0),
    Need("nucleus", top_p=0.6, key=6, position=3, inverse_temperature=2.0),
]
ROWS = RowTable.of(NEEDS)


def steps_until_it_breaks(head: CollectiveHead, hidden: np.ndarray, expected: list[int]) -> float:
    """When the head gave up; every answer before that was right."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            found: Candidates = head.candidates(hidden, ROWS)
        except CollectiveError:
            return time.monotonic()
        assert drawn(found, NEEDS) == expected
    raise AssertionError("it never broke")


def broken_at(
    processes: ShardProcesses, signal_number: int, delay: float, rank: int, seconds: float
) -> float:
    """Seconds between the signal and the root's error, where a step may take ``seconds``."""
    whole = CASE.shard(OwnedRows.every(CASE.size))
    hidden = hidden_states(np.random.default_rng(0), len(NEEDS), CASE.columns)
    expected = drawn(whole.rescore(whole.screen(hidden, ROWS)), NEEDS)
    warm = processes.head(CASE)
    warm.candidates(hidden, ROWS)
    warm.close()
    head = processes.head(CASE, seconds)
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(processes.processes[rank - 1].pid, signal_number)

    timer = threading.Timer(delay, send)
    timer.start()
    ended = steps_until_it_breaks(head, hidden, expected)
    timer.join()
    for other in range(1, CASE.shards):
        assert processes.end_of_service(other) == "done"  # of the group that warmed up
    return ended - sent[0]


def test_stopped_at_any_moment() -> None:
    random = np.random.default_rng(0)
    with shard_processes(2) as processes:
        for _ in range(8):
            rank = int(random.integers(1, 3))
            delay = float(random.uniform(0, 0.1))
            took = broken_at(processes, signal.SIGSTOP, delay, rank, SECONDS)
            assert took < SECONDS + 10
            os.kill(processes.processes[rank - 1].pid, signal.SIGCONT)
            for other in (1, 2):
                assert processes.end_of_service(other).startswith("Collective")


def test_killed_at_any_moment() -> None:
    random = np.random.default_rng(1)
    for _ in range(4):
        with shard_processes(2) as processes:
            rank = int(random.integers(1, 3))
            delay = float(random.uniform(0, 0.1))
            took = broken_at(processes, signal.SIGKILL, delay, rank, 10 * SECONDS)
            assert took < 5 * SECONDS, "no rank waited until a step may take no longer"
            assert processes.end_of_service(3 - rank).startswith(CollectiveLostError.__name__)
