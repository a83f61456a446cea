"""``lexshard bench start``: seconds from the start of a process to the first token over HTTP.

The server is looked for every 50 ms, its port first and ``/health`` then, and asked for one token
when it is well. Phases are told by what it prints meanwhile. Cases: docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from lexshard.loadtest.bench.frame import add_common_arguments, in_turns, names_of, run_bench
from lexshard.loadtest.bench.record import Measure, Report
from lexshard.loadtest.bench.servers.asking import Asker, KilledStream, kill_under_stream
from lexshard.loadtest.bench.servers.command import (
    DRAFT,
    HOME,
    MODEL,
    OURS,
    ServerCommand,
    add_server_arguments,
    asked_servers,
    option_value,
    our_server,
)
from lexshard.loadtest.bench.servers.running import running

WARM, FIRST, AFTER_KILL, STATUS = CASES = ("warm", "first", "after-kill", "status")
QUICK_CASES = (WARM, AFTER_KILL, STATUS)
STATUS_RUNS = 3  # at least: it takes no time
SEED = 17
APART_SECONDS = 7.0  # an engine that dies again sooner is started after a pause

# "[  1.3 s] engine: loading the weights". These seconds count from the start of the process that
# printed them, so the moment a line came is what counts here. Lines that count (", 3 of 80, once on
# this machine") are of one phase.
_LINE = re.compile(r'\[ *\d+\.\d s\] ([^"\n]+?)(?=, \d+ of \d+|["\n]|$)')
_READY = "lexshard is ready"
_WAITING = "not ready"  # says that something else goes on
BEFORE, LAST = "imports, options and checks", "ready to first token"

PHASE = Measure("phase", "s", higher_is_better=False)
GOES_ON = Measure("stream goes on", "s", higher_is_better=False)
ANSWER = Measure("answer", "s", higher_is_better=False)
NOTES = """\
port open, healthy, first token: seconds from the start of the process. phase: seconds from one line
that the server prints to the next. stream goes on: seconds from SIGKILL of the engine to the
stream's next token."""


@dataclass(frozen=True, slots=True)
class StartRun:
    """Seconds from the start of a process until its port was open, it was well, and its first token
    was there; and what it printed of that time (see `phases`)."""

    port_open: float
    healthy: float
    first_token: float
    phases: Mapping[str, float]


MOMENTS: tuple[tuple[Measure, Callable[[StartRun], float]], ...] = (
    (Measure("port open", "s", higher_is_better=False), lambda start: start.port_open),
    (Measure("healthy", "s", higher_is_better=False), lambda start: start.healthy),
    (Measure("first token", "s", higher_is_better=False), lambda start: start.first_token),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case",
        type=names_of(CASES),
        metavar="A,B",
        help=f"default {','.join(CASES)}; quick {','.join(QUICK_CASES)}",
    )
    add_common_arguments(parser, runs=3, quick_runs=1, seed=SEED)
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 where a stream went on with another text."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended as by Ctrl-C
    return run_bench("start", arguments, measure, checked="streams after a kill")


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case; how many streams went on with another text.

    Raises:
        ValueError: options that do not fit.
        RuntimeError: a server does not start or does not answer.
    """
    cases = arguments.case or (QUICK_CASES if arguments.quick else CASES)
    runs, seed = arguments.runs, arguments.seed
    ours, *others = asked_servers(arguments)
    if others and WARM not in cases:
        raise ValueError(f"--against is for --case {WARM}")
    if FIRST in cases and option_value(arguments.options, "--config") is not None:
        raise ValueError(f"--case {FIRST} copies the model: name it by --model, not in --config")
    tell = partial(print, file=sys.stderr)
    killed: list[KilledStream] = []
    if AFTER_KILL in cases or STATUS in cases:
        killed = _on_one_server(report, ours, cases, runs, seed)
    if WARM in cases:
        # The first of each is not measured: it leaves behind what a first start does.
        servers = {each.name: partial(start_once, each, seed) for each in (ours, *others)}
        record_starts(report, WARM, in_turns(servers, runs, tell=tell))
    if FIRST in cases:
        first = {OURS: lambda turn: first_start(arguments.options, seed)}
        record_starts(report, FIRST, in_turns(first, runs, warm_up=0, tell=tell))
    report.notes.append(NOTES)
    wrong = sum(not each.same for each in killed)
    if killed:
        same = f"{len(killed) - wrong} of {len(killed)}"
        report.notes.append(f"streams with the text that they have undisturbed: {same}")
    return wrong


def record_starts(report: Report, case: str, starts: Mapping[str, Sequence[StartRun]]) -> None:
    """Adds what was measured of each server, with ratios to the others where there are some."""
    ours = OURS if len(starts) > 1 else None
    for name in dict.fromkeys(name for each in starts[OURS] for name in each.phases):
        seconds = [each.phases[name] for each in starts[OURS] if name in each.phases]
        report.add({"case": case, "phase": name}, PHASE, {OURS: seconds})
    for measured, value in MOMENTS:
        raw = {name: [value(each) for each in of] for name, of in starts.items()}
        report.add({"case": case}, measured, raw, ours=ours)


# -- starts ---------------------------------------------------------------------------------------


def start_once(server: ServerCommand, seed: int, turn: int = 0) -> StartRun:
    """Starts a server, asks it for a token and ends it; alike in every turn."""
    with running(server) as started:
        port_open = started.wait_for_port()
        healthy = started.wait_until_healthy()
        Asker(started.url, seed).one_token()
        first_token = started.seconds()
        lines = list(started.lines)
    return StartRun(port_open, healthy, first_token, phases(lines, healthy, first_token))


def phases(
    lines: Sequence[tuple[float, str]], healthy: float, first_token: float
) -> dict[str, float]:
    """The seconds of each phase, in order; their sum is ``first_token``.

    ``lines`` are what the server printed, each with the moment it came; moments are seconds from
    the start of the process. A phase begins with its line and lasts until that of the next; the
    last begins when the server says that it is ready, or is found ``healthy``.
    """
    marks = [(0.0, BEFORE)]
    for seconds, line in lines:
        if seconds >= healthy or _READY in line:
            healthy = min(seconds, healthy)
            break
        told = _LINE.search(line)
        if told is not None and not told[1].startswith(_WAITING):
            marks.append((seconds, told[1].strip()))
    marks.append((healthy, LAST))
    found: dict[str, float] = {}
    ends = [seconds for seconds, _ in marks[1:]] + [first_token]
    for (seconds, name), end in zip(marks, ends, strict=True):
        found[name] = found.get(name, 0.0) + end - seconds
    return found


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


# -- a server that runs ---------------------------------------------------------------------------


def _on_one_server(
    report: Report, ours: ServerCommand, cases: Sequence[str], runs: int, seed: int
) -> list[KilledStream]:
    """What is measured of a server that runs: `STATUS`, then `AFTER_KILL`."""
    killed: list[KilledStream] = []
    with running(ours) as server:
        server.wait_until_healthy()
        asker = Asker(server.url, seed)
        asker.one_token()
        if STATUS in cases:
            seconds = [status_seconds(server.url) for _ in range(max(runs, STATUS_RUNS))]
            report.add({"case": STATUS}, ANSWER, {OURS: seconds})
        if AFTER_KILL in cases:
            for turn in range(runs):
                print(f"{AFTER_KILL}, run {turn + 1} of {runs}", file=sys.stderr)
                if killed:
                    time.sleep(APART_SECONDS)
                killed.append(kill_under_stream(server, asker, seed + turn))
            report.add({"case": AFTER_KILL}, GOES_ON, {OURS: [each.seconds for each in killed]})
    return killed


def status_seconds(url: str) -> float:
    """How long the command takes at a terminal.

    Raises RuntimeError where it does not find a server that is ready.
    """
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "status", "--url", url]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"lexshard status: {done.stdout[-500:]}{done.stderr[-500:]}")
    return seconds
