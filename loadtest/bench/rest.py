"""``lexshard bench rest``: what a server costs while nothing asks it anything.

A server answers a few requests, settles, and rests. Then every process of it is accounted for, and
the first request after the rest shows whether it woke up late.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lexshard.loadtest.bench.frame import add_common_arguments, in_turns, run_bench
from lexshard.loadtest.bench.record import (
    CaseLabels,
    Measure,
    Ratio,
    Report,
    paired_ratio,
    percentile,
)
from lexshard.loadtest.bench.servers.asking import Asker
from lexshard.loadtest.bench.servers.command import (
    OURS,
    ServerCommand,
    add_server_arguments,
    asked_servers,
)
from lexshard.loadtest.bench.servers.processes import ProcessUsage, look_at, totals, used_between
from lexshard.loadtest.bench.servers.running import running

REST_SECONDS, QUICK_REST_SECONDS = 60.0, 10.0
SETTLE_SECONDS = 5.0
WARM_UP_REQUESTS = 3
REQUESTS = 20  # right after one another
# Then so many with pauses between: a moment after which caches hold what others put there, and
# nothing has gone to sleep yet.
PAUSED_REQUESTS, PAUSE_SECONDS = 10, 0.25
SEED = 17

MIB = 1 << 20
ALL: CaseLabels = {"process": "all"}
USAGE: tuple[tuple[Measure, Callable[[ProcessUsage], float]], ...] = (
    (Measure("CPU", "% of a core", higher_is_better=False), lambda used: used.cpu_percent),
    (Measure("wakeups", "per s", higher_is_better=False), lambda used: used.wakeups),
    (Measure("RSS", "MiB", higher_is_better=False), lambda used: used.resident_bytes / MIB),
    (Measure("PSS", "MiB", higher_is_better=False), lambda used: used.proportional_bytes / MIB),
)
AFTER_NONE = Measure("TTFT right after one another", "ms", higher_is_better=False)
AFTER_PAUSE = Measure(f"TTFT after {PAUSE_SECONDS:g} s", "ms", higher_is_better=False)
AFTER_REST = Measure("TTFT after the rest", "ms", higher_is_better=False)
NOTES = """\
wakeups: threads that had slept, per second. RSS counts memory that processes share in each of them;
PSS counts every page once, so it can be added up."""


@dataclass(frozen=True, slots=True)
class RestRun:
    """One rest of a server: what its processes used, and times to the first token in seconds."""

    used: tuple[ProcessUsage, ...]
    one_after_another: tuple[float, ...]
    after_pauses: tuple[float, ...]
    after_rest: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        metavar="S",
        help=f"of rest (default {REST_SECONDS:g}, quick {QUICK_REST_SECONDS:g})",
    )
    add(
        "--settle",
        type=float,
        default=SETTLE_SECONDS,
        metavar="S",
        help="between the last request and the rest (default %(default)g)",
    )
    add_common_arguments(parser, runs=3, quick_runs=1, seed=SEED)
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended as by Ctrl-C
    return run_bench("rest", arguments, measure)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every server's rests, by turns; nothing of it can be wrong.

    Raises:
        ValueError: options that do not fit.
        RuntimeError: a server does not start or does not answer.
    """
    seconds = arguments.seconds
    if seconds is None:
        seconds = QUICK_REST_SECONDS if arguments.quick else REST_SECONDS
    if seconds <= 0 or arguments.settle < 0:
        raise ValueError("--seconds, --settle: give positive numbers")

    def rest(server: ServerCommand, turn: int) -> RestRun:
        return rest_once(server, seconds, arguments.settle, arguments.seed + turn)

    servers = {server.name: partial(rest, server) for server in asked_servers(arguments)}
    tell = partial(print, file=sys.stderr)
    record(report, in_turns(servers, arguments.runs, warm_up=0, tell=tell))
    report.notes.append(NOTES)
    return 0


def rest_once(server: ServerCommand, seconds: float, settle: float, seed: int) -> RestRun:
    """Starts a server, asks it, lets it rest and ends it."""
    with running(server) as started:
        started.wait_until_healthy()
        asker = Asker(started.url, seed)
        for _ in range(WARM_UP_REQUESTS):
            asker.first_token_seconds()
        awake = [asker.first_token_seconds() for _ in range(REQUESTS)]
        paused = []
        for _ in range(PAUSED_REQUESTS):
            time.sleep(PAUSE_SECONDS)
            paused.append(asker.first_token_seconds())
        time.sleep(settle)
        before, began = look_at(started.tree()), time.perf_counter()
        time.sleep(seconds)
        after, ended = look_at(started.tree()), time.perf_counter()
        # Before memory is looked at, which wakes nothing but is work.
        first = asker.first_token_seconds()
        used = used_between(before, after, ended - began)
    return RestRun(tuple(used), tuple(awake), tuple(paused), first)


def record(report: Report, rests: Mapping[str, Sequence[RestRun]]) -> None:
    """Adds every process and all of them together, and the first tokens.

    A rest has ratios of its own, to no rest and to a moment: 1 where the first token after it comes
    as soon.
    """
    beside = OURS if len(rests) > 1 else None
    for name, of in rests.items():
        by_role: dict[str, list[ProcessUsage]] = defaultdict(list)
        for each in of:
            for used in each.used:
                by_role[used.role].append(used)
        for role, several in by_role.items():
            for measured, value in USAGE:
                report.add({"process": role}, measured, {name: [value(each) for each in several]})
    for measured, value in USAGE:
        sums = {name: [value(totals(each.used)) for each in of] for name, of in rests.items()}
        countable = all(all(values) for values in sums.values())  # none is too little to see
        report.add(ALL, measured, sums, ours=beside if countable else None)
    rested = {name: [1e3 * each.after_rest for each in of] for name, of in rests.items()}
    for measured, seconds in (
        (AFTER_NONE, lambda each: each.one_after_another),
        (AFTER_PAUSE, lambda each: each.after_pauses),
    ):
        before = {
            name: [1e3 * percentile(seconds(each), 50) for each in of] for name, of in rests.items()
        }
        report.add(ALL, measured, before, ours=beside)
        for name in rests:
            ratio = paired_ratio(rested[name], before[name], higher_is_better=False)
            case: CaseLabels = {"measure": AFTER_REST.name, "of": name}
            report.ratios.append(Ratio(case, measured.name, ratio))
    report.add(ALL, AFTER_REST, rested, ours=beside)
