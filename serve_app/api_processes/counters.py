"""Numbers that only grow, counted by every API process of a server and kept when one dies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.serve_app.api_processes.seats import Seats

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
