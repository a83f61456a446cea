"""``lexshard bench start``: seconds from the start of a process to the first token over HTTP.

Cases: ``warm``, as a server starts that has started here before; ``first``, as it starts without
compiled kernels, remembered timings (a ``LEXSHARD_HOME`` of its own) and vocabulary index (a copy
of the model); ``after-kill``, from SIGKILL of the engine under a stream until the stream goes on,
with the text that it has undisturbed; ``status``, how long ``lexshard status`` takes. Options after
``--`` are those of ``lexshard serve``. Others, given by their command lines (``--against``), take
turns with ours at the warm start.

The server is looked for every 50 ms, its port first and ``/health`` then, and asked for one token
when it is well. Phases are told by what it prints meanwhile.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from lexshard.loadtest.bench.measurement import add_common_arguments, names_of, run_measurement
from lexshard.loadtest.bench.record import Measure, Report
from lexshard.loadtest.bench.servers.asking import Asker
from lexshard.loadtest.bench.servers.running import running
from lexshard.loadtest.bench.servers.server_command import (
    OURS,
    ServerCommand,
    add_server_arguments,
    asked_servers,
    option_value,
)
from lexshard.loadtest.bench.start.after_kill import APART_SECONDS, KilledStream, kill_under_stream
from lexshard.loadtest.bench.start.starts import StartRun, first_start, start_once, status_seconds

WARM, FIRST, AFTER_KILL, STATUS = CASES = ("warm", "first", "after-kill", "status")
QUICK_CASES = (WARM, AFTER_KILL, STATUS)
RUNS, QUICK_RUNS = 3, 1
STATUS_RUNS = 3  # at least: it takes no time
SEED = 17

PHASE = Measure("phase", "s", higher_is_better=False)
MOMENTS: tuple[tuple[Measure, Callable[[StartRun], float]], ...] = (
    (Measure("port open", "s", higher_is_better=False), lambda start: start.port_open),
    (Measure("healthy", "s", higher_is_better=False), lambda start: start.healthy),
    (Measure("first token", "s", higher_is_better=False), lambda start: start.first_token),
)
GOES_ON = Measure("stream goes on", "s", higher_is_better=False)
ANSWER = Measure("answer", "s", higher_is_better=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "--case",
        type=names_of(CASES),
        metavar="A,B",
        help=f"default {','.join(CASES)}; quick {','.join(QUICK_CASES)}",
    )
    add_common_arguments(parser, runs=RUNS, quick_runs=QUICK_RUNS, seed=SEED)
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 where a stream went on with another text."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended as by Ctrl-C
    return run_measurement("start", arguments, measure, "streams after a kill")


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case; how many streams went on with another text.

    Raises:
        ValueError: options that do not fit.
        RuntimeError: a server does not start or does not answer.
    """
    cases = arguments.case or (QUICK_CASES if arguments.quick else CASES)
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    ours, *others = asked_servers(arguments)
    if others and WARM not in cases:
        raise ValueError(f"--against is for --case {WARM}")
    if FIRST in cases and option_value(arguments.options, "--config") is not None:
        raise ValueError(f"--case {FIRST} copies the model: name it by --model, not in --config")
    killed: list[KilledStream] = []
    if AFTER_KILL in cases or STATUS in cases:
        killed = _on_one_server(report, ours, cases, runs, arguments.seed)
    elif WARM in cases:
        start_once(ours, arguments.seed)  # not measured: whatever a first start leaves behind
    if WARM in cases:
        _warm(report, ours, others, runs, arguments.seed)
    if FIRST in cases:
        starts = []
        for turn in range(runs):
            _tell(FIRST, turn, runs)
            starts.append(first_start(arguments.options, arguments.seed))
        record_starts(report, FIRST, {OURS: starts})
    print(f"\n{report.table()}\n")
    print("Medians. port open, healthy, first token: seconds from the start of the process. phase:")
    print("seconds from one line that the server prints to the next. stream goes on: seconds from")
    print("SIGKILL of the engine to the stream's next token.")
    wrong = sum(not each.same for each in killed)
    if killed:
        same = f"{len(killed) - wrong} of {len(killed)}"
        print(f"streams with the text that they have undisturbed: {same}")
    return wrong


def _warm(
    report: Report, ours: ServerCommand, others: Sequence[ServerCommand], runs: int, seed: int
) -> None:
    for server in others:
        start_once(server, seed)  # not measured: whatever a first start leaves behind
    servers = [ours, *others]
    starts: dict[str, list[StartRun]] = {server.name: [] for server in servers}
    for turn in range(runs):
        for server in servers if turn % 2 == 0 else reversed(servers):
            _tell(f"{WARM}: {server.name}", turn, runs)
            starts[server.name].append(start_once(server, seed))
    record_starts(report, WARM, starts)


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
                _tell(AFTER_KILL, turn, runs)
                if killed:
                    time.sleep(APART_SECONDS)
                killed.append(kill_under_stream(server, asker, seed + turn))
            report.add({"case": AFTER_KILL}, GOES_ON, {OURS: [each.seconds for each in killed]})
    return killed


def record_starts(report: Report, case: str, starts: Mapping[str, Sequence[StartRun]]) -> None:
    """Adds what was measured of each server, with ratios to the others where there are some."""
    ours = OURS if len(starts) > 1 else None
    for name in dict.fromkeys(name for each in starts[OURS] for name in each.phases):
        seconds = [each.phases[name] for each in starts[OURS] if name in each.phases]
        report.add({"case": case, "phase": name}, PHASE, {OURS: seconds})
    for measured, value in MOMENTS:
        raw = {name: [value(each) for each in of] for name, of in starts.items()}
        report.add({"case": case}, measured, raw, ours=ours)


def _tell(case: str, turn: int, runs: int) -> None:
    print(f"{case}, run {turn + 1} of {runs}", file=sys.stderr)
