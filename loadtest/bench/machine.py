"""The machine and the versions a figure was measured on, pinning to cores, and how fast the machine
reads memory, which bounds every other figure."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.actors.machine import physical_memory, processor_model

ARRAY_BYTES = 1 << 29  # far beyond any cache
REPEATS = 7
_PACKAGES = ("lexshard", "torch", "transformers", "numba", "numpy")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, system and how busy the machine was when asked."""
    from lexshard.kernels.team.cores import available_cores  # brings numba

    return {
        "processor": processor_model(),
        "cores": available_cores(),
        "memory_bytes": physical_memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": list(os.getloadavg()),
    }


def installed_versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def pinned_to_cores(count: int) -> Iterator[tuple[int, ...]]:
    """Keep this thread, and processes and threads it starts, on ``count`` of its cores.

    The last cores are taken since interrupts tend to land on the first. Raises ValueError if the
    process has fewer.
    """
    allowed = os.sched_getaffinity(0)
    if not 1 <= count <= len(allowed):
        raise ValueError(f"--threads {count}: this process may run on {len(allowed)} cores")
    cores = tuple(sorted(allowed)[-count:])
    os.sched_setaffinity(0, cores)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, allowed)


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
