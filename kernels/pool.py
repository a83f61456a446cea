"""The threads of the CPU kernels, one setting for the process, like ``torch.set_num_threads``.

Compiled functions share their work among a team (`kernels.team`); Python hands independent pieces
to a pool (`run`). How many threads there are changes no result. A step may have as many as were
found to be best for its number of rows: changing costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lexshard.kernels.team import Team
from lexshard.kernels.team.cores import available_cores, can_pin, cores_in_order, pin

Result = TypeVar("Result")
MOST_AT_ONCE = 16  # each has its own scratch memory
# From so many rows on, so many threads; in ascending order of rows.
ThreadChoices = Sequence[tuple[int, int]]

_choices: ThreadChoices = ((1, 1),)
_threads = 1
_most = 1
_team: Team | None = None
_executor: ThreadPoolExecutor | None = None
# The cores of pinned threads, the caller's first; none where they go where they like.
_cores: list[int] = []
# What a job of one thread takes for a team, and never looks at.
_NO_TEAM = np.zeros(1, np.int64)


def pin_threads() -> None:
    """Every thread of the team that there will be keeps to a core of its own; the caller, and what
    it starts, to the others. Does nothing where the system knows of no such thing."""
    global _cores
    if can_pin() and not _cores:
        _cores = cores_in_order()


def set_threads(count: int) -> None:
    """Use ``count`` threads from now on, the caller's among them. Raises ValueError below 1."""
    set_threads_by_rows(((1, count),))


def set_threads_by_rows(choices: ThreadChoices) -> None:
    """Use these numbers of threads in steps from now on, and that of one row before the first.

    Raises ValueError where nothing is said of one row, and for numbers below 1.
    """
    global _choices
    if not choices or choices[0][0] != 1:
        raise ValueError("the number of threads for one row is missing")
    fewest, most = min(each for _, each in choices), max(each for _, each in choices)
    if fewest < 1:
        raise ValueError(f"{fewest} threads cannot compute anything; give at least 1")
    if most > _most:
        _make_room(most)
    elif _team is not None:
        _team.forgive()
    _choices = tuple(choices)
    begin_step(1)


def _make_room(most: int) -> None:
    """For ``most`` threads, and no more: those that a step does not use would wake up for it."""
    global _most, _team, _executor
    if _executor is not None:
        _executor.shutdown()
    if _team is not None:
        _team.dismiss()
    _most, _executor, _team = most, None, None


@contextmanager
def every_core() -> Iterator[None]:
    """As many threads as there are cores for this process, for work that is done once; those of
    before afterwards."""
    choices, most = _choices, _most
    set_threads(min(available_cores(), MOST_AT_ONCE))
    try:
        yield
    finally:
        if _most > most:
            _make_room(most)
        set_threads_by_rows(choices)


def begin_step(rows: int) -> int:
    """Use as many threads as were chosen for a step of ``rows`` rows, until the next step; how many
    these are: one while something else has a core that the team needs. Those of the team wake
    up."""
    global _threads
    for least, count in _choices:
        if rows >= least:
            _threads = count
    if _team is not None and _threads > 1 and not _team.rouse():
        _threads = 1
    return _threads


def threads() -> int:
    """How many threads are in use, the caller's among them."""
    return _threads


def team(*, worth: bool = True) -> tuple[npt.NDArray[np.int64], int]:
    """What compiled code takes to share a job, and among how many threads: those in use, or one
    where the job is not ``worth`` more."""
    global _team
    size = _threads if worth else 1  # read once: a step beside this one may change it
    if size == 1:
        return _NO_TEAM, 1
    if _team is None:
        _team = _new_team()
    return _team.words, size


def _new_team() -> Team:
    """Of as many as a step may have. More than there are cores go where they like."""
    if not _cores:
        return Team(_most)
    pin(_cores)  # a new thread may go where the one may that starts it
    if _most > len(_cores):
        return Team(_most)
    team = Team(_most, _cores[1:_most])
    pin({_cores[0], *_cores[_most:]})
    return team


def run(pieces: Sequence[Callable[[], None]]) -> None:
    """Run every piece, the first in this thread; returns when all are done."""
    global _executor
    lanes = min(_threads, len(pieces))
    if lanes <= 1:
        _run_all(pieces)
        return
    if _executor is None:
        _executor = ThreadPoolExecutor(_most - 1, "kernels")
    others = [_executor.submit(_run_all, pieces[lane::lanes]) for lane in range(1, lanes)]
    _run_all(pieces[::lanes])
    for other in others:
        other.result()


def results(pieces: Sequence[Callable[[], Result]]) -> list[Result]:
    """What every piece gives, in order, run as by `run`."""
    found: dict[int, Result] = {}

    def keep(place: int, piece: Callable[[], Result]) -> None:
        found[place] = piece()

    run([partial(keep, *each) for each in enumerate(pieces)])
    return [found[place] for place in range(len(pieces))]


def _run_all(pieces: Sequence[Callable[[], None]]) -> None:
    for piece in pieces:
        piece()


def even_shares(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut a list of sizes into at most ``parts`` runs ``(first, last)`` of about equal sums."""
    shares: list[tuple[int, int]] = []
    total, first, reached = sum(sizes), 0, 0
    for index, size in enumerate(sizes):
        reached += size
        if reached * parts >= total * (len(shares) + 1):
            shares.append((first, index + 1))
            first = index + 1
    return shares
