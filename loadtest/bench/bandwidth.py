"""How fast this machine reads memory: what every other figure is bounded by."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt

ARRAY_BYTES = 1 << 29  # far beyond any cache
REPEATS = 7


def read_bandwidth(threads: int = 1) -> float:
    """Bytes per second that ``threads`` threads read together, the best of a few sums of integers.

    A sum takes one addition per eight bytes, fewer than anything that multiplies weights.
    """
    values = np.ones(ARRAY_BYTES // 8, np.int64)
    return max(values.nbytes / _seconds(np.array_split(values, threads)) for _ in range(REPEATS))


def _seconds(parts: list[npt.NDArray[np.int64]]) -> float:
    others = [threading.Thread(target=part.sum) for part in parts[1:]]
    started = time.perf_counter()
    for other in others:
        other.start()
    parts[0].sum()
    for other in others:
        other.join()
    return time.perf_counter() - started
