"""The machine and the versions a figure was measured on, and pinning to cores."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lexshard.actors.machine import physical_memory, processor_model

_PACKAGES = ("lexshard", "torch", "transformers", "numba", "numpy")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, system and how busy the machine was when asked."""
    return {
        "processor": processor_model(),
        "cores": os.cpu_count(),
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
