"""How many cores there are, and which the threads of a team are pinned to, where asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CORES = Path("/sys/devices/system/cpu")


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_pin() -> bool:
    """Whether this system lets a thread choose its cores."""
    return hasattr(os, "sched_setaffinity")


def cores_in_order(folder: Path = CORES) -> list[int]:
    """The cores that this thread may use, one of each physical core before the second of any."""
    allowed = sorted(os.sched_getaffinity(0))
    return [core for _, core in sorted((_place(folder, core), core) for core in allowed)]


def pin(cores: Iterable[int]) -> None:
    """This thread, and what it starts from now on, runs on ``cores`` alone."""
    os.sched_setaffinity(0, cores)


def _place(folder: Path, core: int) -> int:
    """The how many-th this is of the hardware threads of its physical core, as Linux lists them
    ("0,64" or "0-1"); 0 where it does not say."""
    try:
        listed = (folder / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return 0
    siblings: list[int] = []
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        siblings.extend(range(int(first), int(last or first) + 1))
    return sum(each < core for each in siblings)
