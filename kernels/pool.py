"""One pool of threads for the CPU kernels, which are serial and release the interpreter lock.

Like ``torch.set_num_threads``: one setting for the process. Kernels hand in independent pieces
(rows of different sequences, panels of a weight); how many there are changes no result. A step may
have as many threads as were found to be best for its number of rows: changing costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

# From so many rows on, so many threads; in ascending order of rows.
ThreadChoices = Sequence[tuple[int, int]]

_choices: ThreadChoices = ((1, 1),)
_threads = 1
_workers = 0
_executor: ThreadPoolExecutor | None = None


def set_threads(count: int) -> None:
    """Use ``count`` threads from now on, the caller's among them. Raises ValueError below 1."""
    set_threads_by_rows(((1, count),))


def set_threads_by_rows(choices: ThreadChoices) -> None:
    """Use these numbers of threads in steps from now on, and that of one row before the first.

    Raises ValueError where nothing is said of one row, and for numbers below 1.
    """
    global _choices, _workers, _executor
    if not choices or choices[0][0] != 1:
        raise ValueError("the number of threads for one row is missing")
    fewest, most = min(each for _, each in choices), max(each for _, each in choices)
    if fewest < 1:
        raise ValueError(f"{fewest} threads cannot compute anything; give at least 1")
    if most - 1 > _workers:
        if _executor is not None:
            _executor.shutdown()
        _workers = most - 1
        _executor = ThreadPoolExecutor(_workers, "kernels")
    _choices = tuple(choices)
    begin_step(1)


def begin_step(rows: int) -> int:
    """Use as many threads as were chosen for a step of ``rows`` rows, until the next step; how many
    these are."""
    global _threads
    for least, count in _choices:
        if rows >= least:
            _threads = count
    return _threads


def threads() -> int:
    """How many threads are in use, the caller's among them."""
    return _threads


def run(pieces: Sequence[Callable[[], None]]) -> None:
    """Run every piece, the first in this thread; returns when all are done."""
    lanes = min(_threads, len(pieces))
    if _executor is None or lanes <= 1:
        for piece in pieces:
            piece()
        return
    others = [_executor.submit(_run_all, pieces[lane::lanes]) for lane in range(1, lanes)]
    _run_all(pieces[::lanes])
    for other in others:
        other.result()


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
