"""What each process of a server spends: CPU seconds by the part it plays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import psutil

from lexshard.loadtest.bench.servers.roles import role_of

SERVING = ("API process", "HAProxy")


def family(processes: Sequence[psutil.Process]) -> dict[int, str]:
    """The roles of a server's processes, by their ids."""
    roles: dict[int, str] = {}
    for process in processes:
        with suppress(psutil.Error):
            roles[process.pid] = role_of(process)
    return roles


def named(process_ids: Sequence[int]) -> dict[int, str]:
    """Processes of another server and their descendants, under their own names."""
    roles: dict[int, str] = {}
    for process_id in process_ids:
        parent = psutil.Process(process_id)
        for process in (parent, *parent.children(recursive=True)):
            title = " ".join(process.cmdline()[:1]) or process.name()
            roles[process.pid] = title.rpartition("/")[2][:32]
    return roles


def cpu_seconds(roles: dict[int, str]) -> dict[str, float]:
    """CPU time since each process began, user and system, summed by role."""
    seconds: dict[str, float] = dict.fromkeys(roles.values(), 0.0)
    for process_id, name in roles.items():
        try:
            times = psutil.Process(process_id).cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds[name] += times.user + times.system
    return seconds


def give_engine_a_core(roles: dict[int, str]) -> None:
    """The engine's processes stay on the first of this process's cores, everything else of the
    server, and what this process starts from now on, on the others.

    Raises:
        ValueError: there is only one core.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise ValueError("an engine has no core of its own on a machine with one")
    for process_id, name in roles.items():
        cores = {first} if name == "engine" else set(others)
        for thread in psutil.Process(process_id).threads():
            os.sched_setaffinity(thread.id, cores)
    os.sched_setaffinity(0, others)
