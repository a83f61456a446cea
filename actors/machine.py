"""What this machine has. Imported where nothing of an engine's is, so it needs nothing itself."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from contextlib import suppress
from pathlib import Path

USUAL_THRESHOLDS = gc.get_threshold()


def physical_memory() -> int:
    """Bytes of this machine's memory, or of what its container may use of it."""
    from lexshard.kernels.team.cores import control_groups, limits  # brings numba

    told = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for group in control_groups("memory"):
        told += [*limits(group / "memory.max"), *limits(group / "memory.limit_in_bytes")]
    return int(min(told))


def processor_model() -> str:
    """What this machine's processor is called, as far as the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def begin_to_load() -> None:
    """Until `settle`, garbage is looked for seldom: what modules and models leave in memory is
    nearly all to stay, and to go through it again and again is a seventh of a start."""
    gc.set_threshold(100_000, 50, 100)


def settle() -> None:
    """Leaves what has been loaded out of all collections of garbage, in a process that is about to
    serve: to go through hundreds of thousands of objects takes 70 ms, in which no stream goes
    on. What loading took and gave back goes back to the system, which the C library does
    when it is asked."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of GNU's C library
    if trim is not None:
        trim(0)
    gc.set_threshold(*USUAL_THRESHOLDS)
