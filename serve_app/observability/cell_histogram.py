"""A histogram in cells that all API processes of a server count in."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from lexshard.serve_app.api_processes.counters import Cells


def buckets(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' cumulative buckets of ``counts``: one for each bound, one for what is beyond."""
    names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]
    return list(zip(names, accumulate(counts), strict=True))


class CellHistogram:
    """Cells from ``first`` on: one for each of ``bounds``, one for what is beyond, the sum."""

    def __init__(self, name: str, description: str, bounds: Sequence[float], first: int) -> None:
        self.name = name
        self._description = description
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._first = first
        self._sum = first + len(bounds) + 1
        self.end = self._sum + 1

    def observe(self, cells: Cells, value: float) -> None:
        cells[self._first + bisect_left(self._bounds, value)] += 1
        cells[self._sum] += value

    def observe_all(self, cells: Cells, values: npt.NDArray[np.float64]) -> None:
        """Many ``values`` [n] at once."""
        places = np.searchsorted(self._edges, values)
        counts = np.bincount(places, minlength=len(self._bounds) + 1)
        cells[self._first : self._sum] += counts
        cells[self._sum] += values.sum()

    def family(
        self, cells: Cells, name: str | None = None, description: str | None = None
    ) -> HistogramMetricFamily:
        """What has been observed, under its own ``name`` or another."""
        return HistogramMetricFamily(
            name or self.name,
            description or self._description,
            buckets=buckets(self._bounds, cells[self._first : self._sum].tolist()),
            sum_value=float(cells[self._sum]),
        )
