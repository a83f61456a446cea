"""A real server: the command in a process of its own, as a stranger would start it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import psutil

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.ports import free_port
from lexshard.kernels.compile_cache import compiled_folder
from lexshard.kernels.home import VARIABLE as HOME
from tests.support.backends import Backend
from tests.support.exposition import metric
from tests.support.mock_server import model_folder
from tests.support.paths import DEMO, ROOT


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    backend: Backend

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        return metric(self.url, name)


def wait(condition: Any, seconds: float, what: str) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return time.monotonic() - started


def healthy(url: str) -> bool:
    """Not by httpx, which reads every certificate there is for each call: half a core while a
    server starts."""
    try:
        with urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, HTTPException):
        return False


def started(server: Server, seconds: float) -> Server:
    """The server once it is healthy; fails with its log where it ends before."""
    process = server.process
    wait(lambda: healthy(server.url) or process.poll() is not None, seconds, "the server")
    assert process.poll() is None, server.log.read_text()
    return server


def limit_files(most: int) -> None:
    """What this process may have open, which cannot be undone."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def running_server(
    folder: Path,
    *flags: str,
    backend: Backend = "process",
    model: str = str(DEMO),
    home: Path | None = None,
    most_files: int | None = None,
) -> Iterator[Server]:
    """The demo model served as it is stored, with one thread and ``flags``; its log is kept in
    ``folder``. ``home`` is where it keeps files of its own, but for compiled kernels;
    ``most_files`` is the hard limit of what a process may have open."""
    port = free_port()
    log = folder / "log"
    options = f"--port {port} --threads 1 --device cpu --backend {backend}"
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "serve", model]
    command += [*options.split(), *flags]
    # The person that runs the tests may have options there.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LEXSHARD_")
    }
    if home is not None:
        environment |= {"NUMBA_CACHE_DIR": str(compiled_folder()), HOME: str(home)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=None if most_files is None else partial(limit_files, most_files),
        )
    try:
        yield started(Server(f"http://127.0.0.1:{port}", log, process, backend), 240)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            print(log.read_text()[-3000:])
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def running_scripted_server(
    folder: Path, backend: Backend = "process", **options: Any
) -> Iterator[Server]:
    """A server where everything is real but the engines: one of `tests.support.scripted` for every
    API process. Told to stop by the end of its standard input."""
    port = free_port()
    log = folder / "log"
    config = ServeConfig(model=str(model_folder(folder)), port=port, backend=backend, **options)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.scripted", backend],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # its own find tests, too
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    assert process.stdin is not None
    process.stdin.write(config.model_dump_json(by_alias=True).encode() + b"\n")
    process.stdin.flush()
    try:
        yield started(Server(f"http://127.0.0.1:{port}", log, process, backend), 120)
    finally:
        everything: list[psutil.Process] = []
        if process.poll() is None:
            server = psutil.Process(process.pid)
            everything = [server, *server.children(recursive=True)]
        process.stdin.close()
        try:
            process.wait(60)
        finally:
            print(log.read_text()[-3000:])
            for each in everything:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
