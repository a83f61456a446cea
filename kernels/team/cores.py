"""How many cores there are, and which the threads of a team are pinned to, where asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

CORES = Path("/sys/devices/system/cpu")
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> int:
    """How many cores this process may use, and its container gives it the time of."""
    pinned = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if pinned else os.cpu_count() or 1
    for group in control_groups("cpu"):
        told = [*limits(group / "cpu.max"), *limits(group / "cpu.cfs_quota_us")]
        told += limits(group / "cpu.cfs_period_us")  # the quota is -1 where there is none
        if len(told) == 2 and told[0] > 0:
            cores = math.ceil(min(cores, told[0] / told[1]))
    return cores


def control_groups(controller: str) -> Iterator[Path]:
    """Linux's groups of processes that this one is in, as folders, its own before those around it,
    in either version. A container may see its own at the root alone."""
    with suppress(OSError):
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                root, own = GROUPS / (controllers and controller), Path(name.lstrip("/"))
                yield from (root / each for each in (own, *own.parents))


def limits(file: Path) -> list[float]:
    """The numbers in a file of such a group; none where it is not there."""
    with suppress(OSError, ValueError):
        return [float(word.replace("max", "inf")) for word in file.read_text().split()]
    return []


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
