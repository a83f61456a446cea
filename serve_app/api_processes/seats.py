"""Where the API processes of one server meet: a folder, a seat for each, one lock for all, and
numbers that only grow.

Shared memory is a row for each seat that only the process in it writes, so whatever a killed
process has left half done is in a row of its own. A seat is a lock on a file: the system takes it
from a process that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LOCK_SECONDS = 0.5
_PAUSE_SECONDS = 0.00005
SPARE_SEATS = 4  # for successors of processes that do not end as soon as they are told to


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One run of a server, as each of its API processes hears of it: ``folder`` is that run's own,
    ``start_time`` in Unix seconds."""

    folder: Path
    start_time: int


class Seats:
    """The seats in ``folder``, one of them taken by this process for as long as it lives.

    Raises:
        RuntimeError: every seat is taken.
        TimeoutError: see `alone`.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self._lock = _opened(folder / "lock")
        self._seats = [
            _opened(folder / f"seat-{index}") for index in range(processes + SPARE_SEATS)
        ]
        with self.alone():
            taken = next((i for i, seat in enumerate(self._seats) if _try_lock(seat)), None)
        if taken is None:
            raise RuntimeError(f"all {len(self._seats)} seats for API processes are taken")
        self.own = taken

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the ``with`` no other process is in one of its own. No such block may wait for
        anything: it takes microseconds.

        Raises:
            TimeoutError: another process was in one for `LOCK_SECONDS`: it has been stopped.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(self._lock):
            if time.monotonic() > deadline:
                raise TimeoutError("another API process does not run at the moment")
            time.sleep(_PAUSE_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def vacant(self) -> list[int]:
        """The free seats. Call it `alone`: no process takes one meanwhile."""
        found = []
        for index, seat in enumerate(self._seats):
            if index != self.own and _try_lock(seat):
                fcntl.flock(seat, fcntl.LOCK_UN)
                found.append(index)
        return found

    def memory(self, name: str, columns: int, kind: type[Any]) -> npt.NDArray[Any]:
        """Shared numbers [seats, columns] of eight bytes, all zero before the first process."""
        return self._mapped(name, columns * len(self._seats), kind).reshape(-1, columns)

    def common_memory(self, name: str, columns: int, kind: type[Any]) -> npt.NDArray[Any]:
        """Shared numbers [columns] that any process may write that is `alone`."""
        return self._mapped(name, columns, kind)

    def _mapped(self, name: str, count: int, kind: type[Any]) -> npt.NDArray[Any]:
        file, size = _opened(self.folder / name), 8 * count
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk is told here, not by SIGBUS later
                os.posix_fallocate(file, 0, size)
            else:  # macOS
                os.ftruncate(file, size)
            return np.frombuffer(mmap.mmap(file, size), kind)
        finally:
            os.close(file)


def _opened(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


Cells = npt.NDArray[np.float64]


class SharedCounters:
    """``own`` is what this process counts in: cells of a memory that all processes have. One that
    takes the seat of another that is gone counts on from there. Without seats it is alone."""

    def __init__(self, cells: int, seats: Seats | None) -> None:
        if seats is None:
            self._all: Cells = np.zeros((1, cells))
        else:
            self._all = seats.memory("counters", cells, np.float64)
        self.own: Cells = self._all[0 if seats is None else seats.own]

    def total(self) -> Cells:
        """Of all processes, those that are gone included; never less than before."""
        total: Cells = self._all.sum(axis=0)
        return total

    def largest(self, cell: int) -> float:
        """For what every process sees and counts: the most that one of them has seen."""
        return float(self._all[:, cell].max())

    def by_process(self, first: int) -> list[float]:
        """The sum of the cells from ``first`` on of each process, those that are gone included."""
        counts: list[float] = self._all[:, first:].sum(axis=1).tolist()
        return counts
