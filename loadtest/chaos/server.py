"""The server under attack: started as a stranger would start it, its processes to be looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from lexshard.cluster.ports import free_port

START_SECONDS = 300.0  # a first start compiles kernels
STOP_SECONDS = 45.0
# What a process is here, by a piece of its command line: in plain processes, and on Ray.
ROLES = {
    "engine": ("lexshard.cluster.engine.main", "ray::EngineActor"),
    "shard": ("ray::ShardActor",),
    "sampler": ("lexshard.cluster.samplers.main", "ray::SamplerActor"),
    "API process": ("lexshard.serve_app.api_processes.api_process", "ray::ServeReplica"),
    "controller": ("ray::ServeController",),
    "ingress manager": ("ray::HAProxyManager",),
    "haproxy": ("bin/haproxy",),
    "driver": ("lexshard.serve_app.start.driver",),
    "owner": ("lexshard.serve_app.cli",),
    "raylet": ("raylet/raylet",),
    "gcs": ("gcs/gcs_server",),
}
# Those there must be as many of after a fault as before.
SERVING = ("engine", "shard", "sampler", "API process", "controller", "ingress manager", "haproxy")


class ServerError(Exception):
    """The server does not start, or is not what it was expected to be."""


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A running server; ``log`` is what it prints."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tree(self) -> list[psutil.Process]:
        """All of its processes, the first one included; none once that has ended."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def known(self) -> dict[int, str]:
        """Its processes that have a role, by their ids."""
        roles = {process.pid: role_of(process) for process in self.tree()}
        return {pid: role for pid, role in roles.items() if role in ROLES}

    def serving(self) -> Counter[str]:
        """How many processes of each serving role there are."""
        return Counter(role for role in map(role_of, self.tree()) if role in SERVING)

    def find(self, role: str) -> psutil.Process:
        """The process of a role, the first of them where there are several.

        Raises:
            ServerError: there is none.
        """
        found = [process for process in self.tree() if role_of(process) == role]
        if not found:
            raise ServerError(f"no process is the {role}")
        return found[0]

    def answers(self) -> bool:
        """Whether it says that it is well."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def errors_logged(self) -> int:
        """How many tracebacks its log holds."""
        return self.log.read_bytes().count(b"Traceback (most recent call last)")


def role_of(process: psutil.Process) -> str:
    """What a process of the server is; the name of its program where it is nothing of ours."""
    try:
        line = " ".join(process.cmdline())
        known = (role for role, pieces in ROLES.items() if any(piece in line for piece in pieces))
        return next(known, process.name())
    except psutil.Error:
        return "ended"


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    living = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


@contextmanager
def started_server(model: str, options: Sequence[str], log: Path) -> Iterator[ServerUnderTest]:
    """The model served on a free port; ended, with all of its processes, on the way out.

    Raises:
        ServerError: it does not start; the end of what it said is in the message.
    """
    port = free_port()
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "serve", *options]
    command += ["--model", model, "--port", str(port)]
    # Whoever runs the campaign may have options of their own there.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LEXSHARD_")
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    server = ServerUnderTest(port, log, process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        _stop(server)


def _wait_until_ready(server: ServerUnderTest) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.answers():
        if server.process.poll() is not None or time.monotonic() > deadline:
            said = server.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise ServerError(f"the server does not start; its last words:\n{said}")
        time.sleep(0.2)


def _stop(server: ServerUnderTest) -> None:
    processes = server.tree()
    with suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(STOP_SECONDS)
    for process in alive(processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
