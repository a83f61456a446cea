"""One start of a server, from the start of its process to its first token."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lexshard.loadtest.bench.servers.asking import Asker
from lexshard.loadtest.bench.servers.running import running
from lexshard.loadtest.bench.servers.server_command import (
    DRAFT,
    HOME,
    MODEL,
    ServerCommand,
    option_value,
    our_server,
)
from lexshard.loadtest.bench.start.phases import phases


@dataclass(frozen=True, slots=True)
class StartRun:
    """Seconds from the start of a process until its port was open, it was well, and its first token
    was there; and what it printed of that time (see `phases`)."""

    port_open: float
    healthy: float
    first_token: float
    phases: Mapping[str, float]


def start_once(server: ServerCommand, seed: int) -> StartRun:
    """Starts a server, asks it for a token and ends it."""
    with running(server) as started:
        port_open = started.wait_for_port()
        healthy = started.wait_until_healthy()
        Asker(started.url, seed).one_token()
        first_token = started.seconds()
        lines = list(started.lines)
    return StartRun(port_open, healthy, first_token, phases(lines, healthy, first_token))


def first_start(flags: Sequence[str], seed: int) -> StartRun:
    """A start of ours with nothing that an earlier one left behind: a fresh home, and copies of the
    models without an index, all of which are gone afterwards."""
    model = option_value(flags, "--model")
    draft = option_value(flags, "--draft") or (DRAFT if model is None else None)
    with TemporaryDirectory(prefix="lexshard-first-") as name:
        folder = Path(name)
        words = ["--model", str(copy_without_index(Path(model or MODEL), folder / "model"))]
        if draft is not None:
            words += ["--draft", str(copy_without_index(Path(draft), folder / "draft"))]
        server = our_server([*flags, *words], {HOME: str(folder / "home")})
        return start_once(server, seed)


def copy_without_index(model: Path, place: Path) -> Path:
    """A copy of a model's folder, but for its vocabulary index, in the folder ``place``."""
    from lexshard.actors.index.automatic import FILE_NAME  # with torch, which options do without

    ignored = shutil.ignore_patterns(f"{FILE_NAME}*")
    return Path(shutil.copytree(model, place / model.resolve().name, ignore=ignored))


def status_seconds(url: str) -> float:
    """How long the command takes, as somebody at a terminal waits for it.

    Raises:
        RuntimeError: it does not find a server that is ready.
    """
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "status", "--url", url]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"lexshard status: {done.stdout[-500:]}{done.stderr[-500:]}")
    return seconds
