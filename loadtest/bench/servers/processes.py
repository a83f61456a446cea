"""What the processes of a server are, in words, and what they use between two looks at them.

CPU time is user and system time in the kernel's ticks of 10 ms. A voluntary switch is a thread that
went to sleep, so their rate is that of wakeups. Memory that processes share counts in the resident
size of each, and in the proportional size as each one's part, so that only the latter may be added
up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ENDED = "ended meanwhile"
_SWITCHES = "voluntary_ctxt_switches"
# By a piece of the command line. A process that Ray runs calls itself by what it does.
ROLES = (
    ("lexshard.serve_app.cli", "lexshard serve"),
    ("lexshard.serve_app.start.driver", "driver"),
    ("lexshard.cluster.engine.main", "engine"),
    ("ray::EngineActor", "engine"),
    ("lexshard.serve_app.api_processes.api_process", "API process"),
    ("ray::ServeReplica", "API process"),
    ("lexshard.cluster.samplers.main", "sampler"),
    ("ray::SamplerActor", "sampler"),
    ("ray::ShardActor", "shard"),
    ("bin/haproxy", "HAProxy"),
    ("ray::HAProxyManager", "HAProxy's manager"),
    ("ray::ServeController", "Serve's controller"),
    ("ray::ProxyActor", "Serve's proxy"),
    ("ray::IDLE", "idle Ray worker"),
    ("gcs_server", "Ray's GCS"),
    ("raylet/raylet", "raylet"),
    ("dashboard/dashboard.py", "Ray's dashboard"),
    ("ray::DashboardAgent", "Ray's dashboard agent"),
    ("ray::RuntimeEnvAgent", "Ray's environment agent"),
    ("log_monitor.py", "Ray's log monitor"),
    ("autoscaler/_private/monitor.py", "Ray's autoscaler"),
)
_WIDEST = 40


def role_of(process: psutil.Process) -> str:
    """What a process is; of a server that is not ours, the program or module it runs.

    Raises psutil.Error where it has ended.
    """
    return role_in_words(process.cmdline(), process.name())


def role_in_words(command: Sequence[str], name: str) -> str:
    """The role of a process by its command line, or ``name`` where it has none."""
    line = " ".join(command)
    for piece, role in ROLES:
        if piece in line:
            return role
    words = [word for word in command if word]
    if not words:
        return name
    program = words[0] if "::" in words[0] else words[0].rpartition("/")[2]
    if program.startswith("python"):
        program = _of_python(words[1:]) or program
    return program[:_WIDEST]


def told_apart(roles: Sequence[str]) -> list[str]:
    """The same roles, numbered where several processes share one."""
    many = Counter(roles)
    seen: Counter[str] = Counter()
    named = []
    for role in roles:
        seen[role] += 1
        named.append(f"{role} {seen[role]}" if many[role] > 1 else role)
    return named


def _of_python(words: Sequence[str]) -> str:
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            return words[place + 1]
        if word == "-c":
            return "python -c"
        if not word.startswith("-"):
            return word.rpartition("/")[2]
    return ""


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """What a process has used so far: its own CPU seconds, those of its children that have ended,
    and by thread how often it slept."""

    role: str
    cpu_seconds: float = 0.0
    ended_children_seconds: float = 0.0
    switches: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process used per second. ``cpu_percent`` of one core; memory in bytes, 0 for processes
    that had ended (`ENDED`)."""

    role: str
    cpu_percent: float
    wakeups: float = 0.0
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
        slept = sum(count - then.switches.get(thread, 0) for thread, count in now.switches.items())
        cpu = 100 * (now.cpu_seconds - then.cpu_seconds) / seconds
        used.append(ProcessUsage(role, cpu, slept / seconds, *memory_of(process.pid)))
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
        sum(each.resident_bytes for each in used),
        sum(each.proportional_bytes for each in used),
    )


def memory_of(process_id: int) -> tuple[int, int]:
    """Resident and proportional size of a process, in bytes; zeros where it has ended."""
    try:
        told = psutil.Process(process_id).memory_full_info()
    except psutil.NoSuchProcess:
        return 0, 0
    return told.rss, told.pss


def _whole(look: ProcessLook) -> float:
    return look.cpu_seconds + look.ended_children_seconds


def _thread_switches(process_id: int) -> Iterator[tuple[int, int]]:
    for folder in Path(f"/proc/{process_id}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            lines = (folder / "status").read_text(encoding="utf-8").splitlines()
            yield int(folder.name), int(dict(line.partition(":")[::2] for line in lines)[_SWITCHES])
