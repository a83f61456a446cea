"""What the processes of a server use between two looks at them, as Linux counts it.

CPU time is user and system time in the kernel's ticks of 10 ms. A voluntary switch is a thread that
went to sleep, so their rate is that of wakeups; an involuntary one is a thread that was made to
wait for another. Memory that processes share counts in the resident size of each, and in the
proportional size as each one's part, so that only the latter may be added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lexshard.loadtest.bench.servers.roles import role_of, told_apart

ENDED = "ended meanwhile"
_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_NONE = (0, 0)


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """What a process has used so far: its own CPU seconds, those of its children that have ended,
    and by thread how often it slept and how often it had to wait."""

    role: str
    cpu_seconds: float = 0.0
    ended_children_seconds: float = 0.0
    switches: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process used per second. ``cpu_percent`` of one core; memory in bytes, 0 for processes
    that had ended (`ENDED`)."""

    role: str
    cpu_percent: float
    wakeups: float = 0.0
    involuntary: float = 0.0
    resident_bytes: int = 0
    proportional_bytes: int = 0


Looks = Mapping[psutil.Process, ProcessLook]


def look_at(processes: Iterable[psutil.Process]) -> dict[psutil.Process, ProcessLook]:
    """What each has used so far, in the order given; those that have ended are left out."""
    looks = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            times = process.cpu_times()
            looks[process] = ProcessLook(
                role_of(process),
                times.user + times.system,
                times.children_user + times.children_system,
                dict(_thread_switches(process.pid)),
            )
    return looks


def used_between(before: Looks, after: Looks, seconds: float) -> list[ProcessUsage]:
    """What every process of ``after`` used in the ``seconds`` since ``before``, roles told apart.

    Processes that ended in between are one entry, where they used anything: parents are told the
    CPU time of their children when these end.
    """
    used = []
    roles = told_apart([look.role for look in after.values()])
    for role, (process, now) in zip(roles, after.items(), strict=True):
        then = before.get(process, ProcessLook(now.role))
        slept, waited = (
            sum(
                counts[kind] - then.switches.get(thread, _NONE)[kind]
                for thread, counts in now.switches.items()
            )
            for kind in (0, 1)
        )
        cpu = 100 * (now.cpu_seconds - then.cpu_seconds) / seconds
        memory = memory_of(process.pid)
        used.append(ProcessUsage(role, cpu, slept / seconds, waited / seconds, *memory))
    everything = sum(map(_whole, after.values())) - sum(map(_whole, before.values()))
    if (rest := 100 * everything / seconds - sum(each.cpu_percent for each in used)) > 1e-6:
        used.append(ProcessUsage(ENDED, rest))
    return used


def totals(used: Sequence[ProcessUsage]) -> ProcessUsage:
    """All of them together; the resident size then counts shared memory several times."""
    return ProcessUsage(
        f"all processes ({sum(each.role != ENDED for each in used)})",
        sum(each.cpu_percent for each in used),
        sum(each.wakeups for each in used),
        sum(each.involuntary for each in used),
        sum(each.resident_bytes for each in used),
        sum(each.proportional_bytes for each in used),
    )


def memory_of(process_id: int) -> tuple[int, int]:
    """Resident and proportional size of a process, in bytes; zeros where it has ended."""
    try:
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    told = {name: value for name, _, value in (line.partition(":") for line in lines)}
    resident, proportional = (1024 * int(told[name].split()[0]) for name in ("Rss", "Pss"))
    return resident, proportional


def _whole(look: ProcessLook) -> float:
    return look.cpu_seconds + look.ended_children_seconds


def _thread_switches(process_id: int) -> Iterator[tuple[int, tuple[int, int]]]:
    for folder in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            lines = (folder / "status").read_text(encoding="utf-8").splitlines()
            told = dict(line.partition(":")[::2] for line in lines)
            slept, waited = (int(told[name]) for name in _SWITCHES)
            yield int(folder.name), (slept, waited)
