"""What each process of a server is, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import psutil

# By a piece of the command line. A process that Ray runs calls itself by what it does.
ROLES = (
    ("lexshard.serve_app.cli", "lexshard serve"),
    ("serve_path.scripted_server", "lexshard serve"),
    ("lexshard.serve_app.start.driver", "driver"),
    ("lexshard.cluster.engine.main", "engine"),
    ("ray::EngineActor", "engine"),
    ("serve_path.scripted_main", "engine"),
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
