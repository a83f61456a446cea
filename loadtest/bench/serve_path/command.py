"""``lexshard bench serve-path``: from the engine to the wire.

An engine that computes nothing emits tokens at a given rate behind the real ingress, API processes
and transport; a client that costs little counts what arrives. CPU time is that of whole processes,
user and system, from before the first request to after the last. ``--engine real`` puts the model's
own engine there. With ``--against`` another server takes turns with ours, run by run, on the same
cores; its processes are told by their ids. ``--against engine`` compares with our engine alone, in
a process without HTTP: in both the engine has one thread and a core of its own. ``--engine-core``
gives it that without the comparison.

Streams ask in lockstep, all at one moment, and staggered: both are measured and told.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lexshard.cluster.config import OPTIONS, Option, ServeConfig
from lexshard.cluster.ports import free_port
from lexshard.loadtest.bench.machine import describe_machine, installed_versions
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report, percentile
from lexshard.loadtest.bench.serve_path.load import Load, LoadResult, as_arguments
from lexshard.loadtest.bench.serve_path.processes import (
    SERVING,
    cpu_seconds,
    family,
    give_engine_a_core,
    named,
)
from lexshard.loadtest.bench.servers.running import running
from lexshard.loadtest.bench.servers.server_command import OURS, ServerCommand

STREAMS = (1, 32, 256)
RUNS, QUICK_RUNS = 3, 1
TOKENS = 256
LEAST_TOKENS = 4  # so that staggered responses, too, have a time per token after the first
REQUESTS, QUICK_REQUESTS = 384, 96  # at most so many of one run, over all streams
TOKENS_PER_SECOND = 20_000.0
ARRIVALS = ("lockstep", "staggered")
WARM_UP_REQUESTS = 2

THROUGHPUT = Measure("streamed tokens/s", "tokens/s", higher_is_better=True)
FIRST = Measure("TTFT median", "ms", higher_is_better=False)
PER_TOKEN = Measure("TPOT median", "ms", higher_is_better=False)
BETWEEN = Measure("ITL p99", "ms", higher_is_better=False)


@dataclass(frozen=True, slots=True)
class Server:
    """Somebody who is asked: an address, a model's name, and the roles of processes by id."""

    name: str
    url: str
    model: str
    roles: dict[int, str]


@dataclass(frozen=True, slots=True)
class ServeRun:
    """What one run of the client was told, and the CPU seconds it cost each role."""

    load: LoadResult
    cpu: dict[str, float]

    def microseconds_per_token(self, *roles: str) -> float:
        return 1e6 * sum(self.cpu.get(role, 0.0) for role in roles) / self.load.tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--model", default="models/lexshard-demo", metavar="DIR")
    parser.add_argument(
        "--engine",
        choices=("scripted", "real"),
        default="scripted",
        help="what stands behind the API processes (default scripted)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=TOKENS_PER_SECOND,
        metavar="TOKENS/S",
        help=f"of the scripted engine, over all streams (default {TOKENS_PER_SECOND:,.0f})",
    )
    parser.add_argument(
        "--streams",
        type=lambda text: tuple(map(int, text.split(","))),
        default=STREAMS,
        metavar="N,N",
        help="simultaneous streams (default 1,32,256)",
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="of each response")
    parser.add_argument(
        "--arrivals",
        choices=(*ARRIVALS, "both"),
        default="both",
        help="lockstep: all streams ask again at one moment; staggered: their responses have "
        "different lengths (default both)",
    )
    parser.add_argument(
        "--engine-core",
        action="store_true",
        help="the engine has one thread and a core of its own, as with --against engine",
    )
    parser.add_argument("--runs", type=int, metavar="N", help=f"(default {RUNS}, --quick 1)")
    parser.add_argument("--quick", action="store_true", help="one short run: under a minute")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of our server, as in its configuration file; repeatable",
    )
    parser.add_argument(
        "--against",
        metavar="URL|engine",
        help="another server that is running already, or our engine alone",
    )
    parser.add_argument("--against-model", metavar="NAME", help="the model's name there")
    parser.add_argument(
        "--against-processes",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(),
        metavar="PID,PID",
        help="its processes (their children are found)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    try:
        if arguments.tokens < LEAST_TOKENS:
            raise ValueError(f"--tokens {arguments.tokens}: give at least {LEAST_TOKENS}")
        with our_server(arguments) as ours:
            servers = [ours]
            if arguments.against:
                servers.append(_other(arguments, ours))
            report = measure(arguments, servers)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"lexshard bench serve-path: {error}", file=sys.stderr)
        return 1
    print(f"\n{report.table()}\n")
    print("CPU: microseconds of all processes of a role per streamed token; serving is the ingress")
    print("and the API processes together. we are: median of the ratios of neighbouring runs.")
    if arguments.json is not None:
        report.write(arguments.json)
    return 0


@contextmanager
def our_server(arguments: argparse.Namespace) -> Iterator[Server]:
    """Ours, on a free port of this machine.

    Raises:
        RuntimeError: it did not start.
    """
    import yaml

    options = {key: yaml.safe_load(value) for key, _, value in _pairs(arguments.option)}
    most = max(arguments.streams)
    if arguments.against == "engine" and arguments.engine != "real":
        raise ValueError("--against engine compares real engines: give --engine real")
    own_core = arguments.engine_core or arguments.against == "engine"
    fixed = {"threads": 1} if own_core else {}
    options = {"max_running_requests": max(256, most), **fixed, **options}
    port = free_port()
    config = ServeConfig(model=arguments.model, port=port, **options)
    url = f"http://127.0.0.1:{port}"
    with running(ServerCommand(OURS, _command(arguments, config), url)) as server:
        server.wait_until_healthy()
        roles = family(server.tree())
        if own_core:
            give_engine_a_core(roles)
        yield Server(OURS, url, config.model_names[0], roles)


def _command(arguments: argparse.Namespace, config: ServeConfig) -> tuple[str, ...]:
    if arguments.engine == "scripted":
        module = "lexshard.loadtest.bench.serve_path.scripted_server"
        told = config.model_dump_json(by_alias=True)
        return (sys.executable, "-m", module, str(arguments.rate), told)
    set_options = config.model_dump(by_alias=True, exclude_unset=True)
    flags = [word for option in OPTIONS for word in _flag(option, set_options.get(option.key))]
    return (sys.executable, "-m", "lexshard.serve_app.cli", "serve", *flags)


def _flag(option: Option, value: Any) -> list[str]:
    if value is None or option.flag is None:
        return []
    if isinstance(value, bool):
        return [option.flag] if value else []
    values = value if isinstance(value, list) else [value]
    return [word for each in values for word in (option.flag, str(each))]


def _other(arguments: argparse.Namespace, ours: Server) -> Server:
    if arguments.against == "engine":
        return Server("engine alone", "", arguments.model, {})
    roles = named(arguments.against_processes)
    name = arguments.against_model or ours.model
    return Server("other", arguments.against.rstrip("/"), name, roles)


def _pairs(options: list[str]) -> Iterator[tuple[str, str, str]]:
    for text in options:
        if "=" not in text:
            raise ValueError(f"--option {text}: KEY=VALUE is wanted")
        yield text.partition("=")


def measure(arguments: argparse.Namespace, servers: list[Server]) -> Report:
    """Every case with every server, which take turns."""
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    requests = QUICK_REQUESTS if arguments.quick else REQUESTS
    command = shlex.join(["lexshard", "bench", "serve-path", *sys.argv[3:]])
    report = Report(describe_machine(), installed_versions(), command, seed=0)
    for server in servers:
        ask(server, Load(1, WARM_UP_REQUESTS, arguments.tokens))
    wanted = ARRIVALS if arguments.arrivals == "both" else (arguments.arrivals,)
    for streams in arguments.streams:
        # As long as it takes to see a role's CPU, which the system counts in steps of 10 ms.
        rounds = max(1, min(requests, 12 * streams) // streams)
        for arrivals in wanted:
            load = Load(streams, rounds, arguments.tokens, arrivals == "staggered")
            told: dict[str, list[ServeRun]] = {server.name: [] for server in servers}
            for index in range(runs):
                for server in servers if index % 2 == 0 else reversed(servers):
                    print(
                        f"{streams} streams, {arrivals}, run {index + 1}: {server.name}",
                        file=sys.stderr,
                    )
                    told[server.name].append(ask(server, load))
            _record(report, {"streams": streams, "arrivals": arrivals}, told)
    return report


def ask(server: Server, load: Load) -> ServeRun:
    """One run of the client, in a process of its own.

    Raises RuntimeError with what it said if it fails.
    """
    program = "client" if server.url else "engine_alone"
    command = [sys.executable, "-m", f"lexshard.loadtest.bench.serve_path.{program}"]
    if server.url:
        command += [server.url, server.model]
    else:  # on the core that our server's engine has, which rests meanwhile
        core = min(set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0))
        command += [server.model, "--core", str(core)]
    before = cpu_seconds(server.roles)
    finished = subprocess.run(
        [*command, *as_arguments(load)], capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"the client of {server.name}: {finished.stderr[-500:]}")
    spent = {role: after - before[role] for role, after in cpu_seconds(server.roles).items()}
    return ServeRun(LoadResult(**json.loads(finished.stdout)), spent)


def _record(report: Report, case: CaseLabels, told: dict[str, list[ServeRun]]) -> None:
    def add(measured: Measure, raw: dict[str, list[float]]) -> None:
        report.add(case, measured, raw, ours="lexshard" if len(raw) > 1 else None)

    loads = {name: [each.load for each in runs] for name, runs in told.items()}
    add(THROUGHPUT, {n: [each.tokens / each.seconds for each in of] for n, of in loads.items()})
    for measured, seconds, percent in (
        (FIRST, "first_token_seconds", 50),
        (PER_TOKEN, "per_token_seconds", 50),
        (BETWEEN, "between_seconds", 99),
    ):
        add(
            measured,
            {
                name: [1e3 * percentile(getattr(each, seconds), percent) for each in of]
                for name, of in loads.items()
            },
        )
    for name, runs in told.items():
        roles = sorted(set().union(*(each.cpu for each in runs)))
        if name == "lexshard":
            own = Measure("CPU: serving", "us/token", higher_is_better=False)
            report.add(case, own, {name: [r.microseconds_per_token(*SERVING) for r in runs]})
        for role in roles:
            spent = Measure(f"CPU: {role}", "us/token", higher_is_better=False)
            report.add(case, spent, {name: [each.microseconds_per_token(role) for each in runs]})
