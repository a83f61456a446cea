"""A team of threads does a compiled job whole, whatever else runs, and sleeps without one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from lexshard.kernels.team import MOST_ALONE, Team, jobs
from lexshard.kernels.team.cores import can_pin, cores_in_order
from lexshard.kernels.team.jobs import run, wait_for_all


@njit(nogil=True)
def _pass_on(rank, size, team, table):  # type: ignore[no-untyped-def]
    """Every thread adds up what all of them wrote in the round before."""
    for turn in range(1, table.shape[0]):
        total = 1
        for other in range(size):
            total += table[turn - 1, other]
        table[turn, rank] = total % 1_000_003
        wait_for_all(team, size)


@njit(nogil=True)
def _in_rounds(team, size, table):  # type: ignore[no-untyped-def]
    run(team, size, _pass_on, (team, table))


@njit(nogil=True)
def _count(rank, size, seen):  # type: ignore[no-untyped-def]
    seen[rank] += 1
    seen[-1] = size


@njit(nogil=True)
def _again(rank, size, team, seen):  # type: ignore[no-untyped-def]
    run(team, size, _count, (seen[rank],))


@njit(nogil=True)
def _nested(team, size, seen):  # type: ignore[no-untyped-def]
    run(team, size, _again, (team, seen))


@njit(nogil=True)
def _fail(rank, size, which):  # type: ignore[no-untyped-def]
    if rank == which:
        raise ValueError("broken")


@njit(nogil=True)
def _fail_before_all_meet(rank, size, which, team):  # type: ignore[no-untyped-def]
    if rank == which:
        raise ValueError("broken")
    wait_for_all(team, size)
    wait_for_all(team, size)


@njit(nogil=True)
def _failing_early(team, size, which):  # type: ignore[no-untyped-def]
    run(team, size, _fail_before_all_meet, (which, team))


@njit(nogil=True)
def _failing(team, size, which):  # type: ignore[no-untyped-def]
    run(team, size, _fail, (which,))


@pytest.fixture
def team() -> Iterator[Team]:
    found = Team(4)
    yield found
    found.dismiss()


def rounds(team: Team, size: int, count: int = 500) -> int:
    table = np.zeros((count, size), np.int64)
    _in_rounds(team.words, size, table)
    assert (table == table[:, :1]).all()
    return int(table[-1, 0])


def _whole(team: Team) -> bool:
    """Whether a job in four threads, or in one beside another caller's, is done whole."""
    table = np.zeros((100, 4), np.int64)
    _in_rounds(team.words, 4, table)
    alone = not table[:, 1:].any()
    return bool((table[1:, 0] > 0).all() and (alone or (table == table[:, :1]).all()))


def test_all_see_what_all_wrote_before_they_met(team: Team) -> None:
    for size in (1, 2, 3, 4, 1, 4, 2):
        expected = 0
        for _ in range(499):
            expected = (1 + size * expected) % 1_000_003
        assert rounds(team, size) == expected


@pytest.mark.slow
def test_a_job_within_a_job_and_two_callers_are_done_whole(team: Team) -> None:
    seen = np.zeros((3, 5), np.int64)
    _nested(team.words, 3, seen)
    assert (seen[:, 0] == 1).all()  # each by its own caller
    assert (seen[:, -1] == 1).all()  # alone
    found: list[bool] = []
    callers = [
        threading.Thread(target=lambda: found.extend(_whole(team) for _ in range(50)))
        for _ in range(3)
    ]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert found == [True] * 150


def test_a_part_that_fails_is_the_callers_error(team: Team) -> None:
    for which in range(3):
        with pytest.raises(RuntimeError, match="failed"):
            _failing(team.words, 3, which)
        with pytest.raises(RuntimeError, match="failed"):
            _failing_early(team.words, 3, which)
    assert rounds(team, 3) == rounds(team, 3)


@pytest.mark.timed
def test_sleeping_threads_take_nothing_and_wake_up(team: Team) -> None:
    expected = rounds(team, 4)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05
    assert rounds(team, 4) == expected
    team.rouse()
    assert rounds(team, 4) == expected


def test_a_caller_goes_on_alone_while_others_are_kept_waiting(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer than a moment where that was a while, however short its steps are, nor at all
    where it was a moment."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)

    def together(seconds: float, lost: float) -> float:
        """The share of steps of 1 ms that have the team, of which such a share is lost."""
        nonlocal clock
        count = round(seconds * 1000)
        found = 0
        for _ in range(count):
            if team.rouse():
                team.words[jobs.SHARED] += 1_000_000
                team.words[jobs.LOST] += round(lost * 1_000_000)
                found += 1
            clock += 0.001
        return found / count

    assert together(1.0, 0.1) == 1.0
    assert together(40.0, 0.9) < 0.01
    clock += MOST_ALONE
    assert together(1.0, 0.0) == 1.0
    assert together(0.003, 0.9) == 1.0
    assert together(0.3, 0.0) == 1.0
    together(0.02, 0.9)
    assert not team.rouse()
    assert together(0.3, 0.0) > 0.6
    team.words[jobs.SHARED], team.words[jobs.LOST] = 20_000_000, 18_000_000
    assert together(0.3, 0.0) == 0.0
    assert together(0.3, 0.0) > 0.6


def test_a_call_of_several_steps_knows_that_it_is_kept_waiting(team: Team) -> None:
    for lost, shared, kept in ((900_000, 1_000_000, False), (2_000_000, 9_000_000, True)):
        team.words[jobs.LOST], team.words[jobs.SHARED] = lost, shared
        assert jobs.is_kept_waiting(team.words) is kept


@pytest.mark.slow
def test_a_team_is_dismissed_beside_its_jobs() -> None:
    """As where an interpreter ends whose engine steps in a daemon thread."""
    for _ in range(20):
        team, ends = Team(4), threading.Event()
        whole: list[bool] = []

        def work(team: Team, ends: threading.Event, whole: list[bool]) -> None:
            while not ends.is_set():
                whole.append(_whole(team))

        caller = threading.Thread(target=work, args=(team, ends, whole), daemon=True)
        caller.start()
        time.sleep(0.01)
        dismissing = threading.Thread(target=team.dismiss, daemon=True)
        dismissing.start()
        dismissing.join(30)
        assert not dismissing.is_alive()
        assert _whole(team)  # later ones are the caller's alone
        ends.set()
        caller.join(30)
        assert not caller.is_alive()
        assert all(whole)


def test_a_process_ends_with_its_team() -> None:
    """Whether its threads sleep or look for a job."""
    for pause in (0.0, 0.3):
        script = (
            "import time\n"
            "from lexshard.kernels import pool\n"
            f"pool.set_threads(3); pool.team(); time.sleep({pause})\n"
        )
        ended = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
        assert ended.returncode == 0


PINNED = """
import os, threading
from pathlib import Path
from lexshard.kernels import pool

allowed = sorted(os.sched_getaffinity(0))
pool.pin_threads()
pool.set_threads(len(allowed))
pool.team()
cores = {
    each.name: os.sched_getaffinity(each.native_id)
    for each in threading.enumerate() if each.name.startswith("team-")
}
mine = os.sched_getaffinity(0)
every = [mine, *cores.values()]
assert all(len(each) == 1 for each in every), every
assert sorted(core for each in every for core in each) == allowed
pool.set_threads(len(allowed) + 1)
pool.team()
print(os.sched_getaffinity(0) == set(allowed))
"""


@pytest.mark.skipif(not can_pin(), reason="threads cannot choose their cores here")
def test_pinned_threads_have_a_core_each() -> None:
    """More of them than there are cores go where they like."""
    done = subprocess.run(
        [sys.executable, "-c", PINNED], check=True, capture_output=True, text=True
    )
    assert done.stdout == "True\n"


@pytest.mark.skipif(not can_pin(), reason="threads cannot choose their cores here")
def test_physical_cores_come_before_their_second_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    for core, siblings in enumerate(["0-1", "0-1", "2,3", "2,3"]):  # of 5 nothing is said
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert cores_in_order(tmp_path) == [0, 2, 5, 1, 3]
