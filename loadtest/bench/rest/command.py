"""``lexshard bench rest``: what a server costs while nobody asks it anything.

A server is started as ``make serve`` starts it (options after ``--`` are its own), answers a few
requests, settles, and rests. Then every process of it is accounted for: CPU time, wakeups and
memory. The first request after the rest shows whether it woke up late: its time to the first token
beside that of requests right after one another. Others, given by their command lines
(``--against``), take turns with ours, one server at a time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lexshard.loadtest.bench.measurement import add_common_arguments, run_measurement
from lexshard.loadtest.bench.record import (
    CaseLabels,
    Measure,
    Ratio,
    Report,
    format_number,
    format_table,
    paired_ratio,
    percentile,
)
from lexshard.loadtest.bench.rest.usage import ProcessUsage, look_at, totals, used_between
from lexshard.loadtest.bench.servers.asking import Asker
from lexshard.loadtest.bench.servers.running import running
from lexshard.loadtest.bench.servers.server_command import (
    OURS,
    ServerCommand,
    add_server_arguments,
    asked_servers,
)

RUNS, QUICK_RUNS = 3, 1
REST_SECONDS, QUICK_REST_SECONDS = 60.0, 10.0
SETTLE_SECONDS = 5.0
WARM_UP_REQUESTS = 3
REQUESTS = 20  # right after one another
SEED = 17

MIB = 1 << 20
ALL: CaseLabels = {"process": "all"}
USAGE: tuple[tuple[Measure, Callable[[ProcessUsage], float]], ...] = (
    (Measure("CPU", "% of a core", higher_is_better=False), lambda used: used.cpu_percent),
    (Measure("wakeups", "per s", higher_is_better=False), lambda used: used.wakeups),
    (Measure("involuntary switches", "per s", higher_is_better=False), lambda u: u.involuntary),
    (Measure("RSS", "MiB", higher_is_better=False), lambda used: used.resident_bytes / MIB),
    (Measure("PSS", "MiB", higher_is_better=False), lambda used: used.proportional_bytes / MIB),
)
AFTER_NONE = Measure("TTFT right after one another", "ms", higher_is_better=False)
AFTER_REST = Measure("TTFT after the rest", "ms", higher_is_better=False)


@dataclass(frozen=True, slots=True)
class RestRun:
    """One rest of a server: what its processes used, and times to the first token in seconds."""

    used: tuple[ProcessUsage, ...]
    one_after_another: tuple[float, ...]
    after_rest: float

    @property
    def after_rest_ms(self) -> float:
        return 1e3 * self.after_rest

    def awake_ms(self, percent: float) -> float:
        """A percentile of the times to the first token of requests right after one another."""
        return 1e3 * percentile(self.one_after_another, percent)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"of rest (default {REST_SECONDS:g}, quick {QUICK_REST_SECONDS:g})",
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=SETTLE_SECONDS,
        metavar="S",
        help="between the last request and the rest (default %(default)g)",
    )
    add_common_arguments(parser, runs=RUNS, quick_runs=QUICK_RUNS, seed=SEED)
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended as by Ctrl-C
    return run_measurement("rest", arguments, measure, "figures")


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every server's rests, by turns; nothing of it can be wrong.

    Raises:
        ValueError: options that do not fit.
        RuntimeError: a server does not start or does not answer.
    """
    seconds = arguments.seconds or (QUICK_REST_SECONDS if arguments.quick else REST_SECONDS)
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    if seconds <= 0 or arguments.settle < 0 or runs < 1:
        raise ValueError("--seconds, --settle, --runs: give positive numbers")
    servers = asked_servers(arguments)
    rests: dict[str, list[RestRun]] = {server.name: [] for server in servers}
    for turn in range(runs):
        for server in servers if turn % 2 == 0 else reversed(servers):
            print(f"run {turn + 1} of {runs}: {server.name}", file=sys.stderr)
            seed = arguments.seed + turn
            rests[server.name].append(rest_once(server, seconds, arguments.settle, seed))
    record(report, rests)
    for name, of in rests.items():
        print(f"\n{name}, {seconds:g} s of rest\n{usage_table(of)}")
        print(told_first_tokens(of))
    print("\nMedians of runs. wakeups: threads that had slept, per second. RSS counts memory that")
    print("processes share in each of them; PSS counts every page once, so it can be added up.")
    for ratio in report.ratios:
        if ratio.case.get("process") == "all":
            print(f"{ratio.case['measure']}: {ratio.ratio:.2f}x against {ratio.against}")
    return 0


def rest_once(server: ServerCommand, seconds: float, settle: float, seed: int) -> RestRun:
    """Starts a server, asks it, lets it rest and ends it."""
    with running(server) as started:
        started.wait_until_healthy()
        asker = Asker(started.url, seed)
        for _ in range(WARM_UP_REQUESTS):
            asker.first_token_seconds()
        awake = [asker.first_token_seconds() for _ in range(REQUESTS)]
        time.sleep(settle)
        before, began = look_at(started.tree()), time.perf_counter()
        time.sleep(seconds)
        after, ended = look_at(started.tree()), time.perf_counter()
        # Before memory is looked at, which wakes nobody but is work.
        first = asker.first_token_seconds()
        used = used_between(before, after, ended - began)
    return RestRun(tuple(used), tuple(awake), first)


def record(report: Report, rests: Mapping[str, Sequence[RestRun]]) -> None:
    """Adds every process and all of them together, and the first tokens.

    A rest has a ratio of its own, to no rest: 1 where the first token after it comes as soon.
    """
    beside = OURS if len(rests) > 1 else None
    for measured, value in USAGE:
        sums = {name: [value(totals(each.used)) for each in of] for name, of in rests.items()}
        countable = all(all(values) for values in sums.values())  # nobody used too little to see
        report.add(ALL, measured, sums, ours=beside if countable else None)
        for name, of in rests.items():
            for role, used in by_role(of).items():
                report.add({"process": role}, measured, {name: [value(each) for each in used]})
    awake = {name: [each.awake_ms(50) for each in of] for name, of in rests.items()}
    rested = {name: [each.after_rest_ms for each in of] for name, of in rests.items()}
    report.add(ALL, AFTER_NONE, awake, ours=beside)
    report.add(ALL, AFTER_REST, rested, ours=beside)
    for name in rests:
        ratio = paired_ratio(rested[name], awake[name], higher_is_better=False)
        case: CaseLabels = {"measure": AFTER_REST.name, "of": name}
        report.ratios.append(Ratio(case, AFTER_NONE.name, ratio))


def by_role(rests: Sequence[RestRun]) -> dict[str, list[ProcessUsage]]:
    """What the processes of each role used, run by run where they were there."""
    found: dict[str, list[ProcessUsage]] = defaultdict(list)
    for each in rests:
        for used in each.used:
            found[used.role].append(used)
    return found


def usage_table(rests: Sequence[RestRun]) -> str:
    """A line per process, the last one for all."""
    lines = [*by_role(rests).values(), [totals(each.used) for each in rests]]
    rows = [
        [
            used[-1].role,
            *(format_number(percentile([value(u) for u in used], 50)) for _, value in USAGE),
        ]
        for used in lines
    ]
    headers = [f"{measured.name}, {measured.unit}" for measured, _ in USAGE]
    return format_table(["process", *headers], rows)


def told_first_tokens(rests: Sequence[RestRun]) -> str:
    """The first token after the rest beside those after none, in a line."""
    awake, slow = ([each.awake_ms(percent) for each in rests] for percent in (50, 90))
    rested = [each.after_rest_ms for each in rests]
    later = paired_ratio(awake, rested, higher_is_better=False)
    return (
        f"first token: {percentile(rested, 50):.1f} ms after the rest; right after one another "
        f"{percentile(awake, 50):.1f} (p90 {percentile(slow, 50):.1f}): {later:.2f} times as long"
    )
