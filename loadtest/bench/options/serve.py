"""The options of ``lexshard bench serve``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lexshard.loadtest.arrivals import ARRIVALS
from lexshard.loadtest.bench.frame import add_common_arguments, count
from lexshard.loadtest.bench.load.figures import objective
from lexshard.loadtest.bench.servers.endpoint import endpoint
from lexshard.loadtest.traces import SAMPLES

REQUESTS = 100
QUICK_SECONDS = 10.0  # of each rate
SEED = 17
WARM_UP = 4
TIMEOUT_SECONDS = 300.0
LATE_LIMIT_MS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    add = parser.add_argument
    add(
        "--against",
        type=endpoint,
        action="append",
        required=True,
        metavar="[NAME=]URL",
        help="an OpenAI endpoint; repeatable: they take turns, ratios are the first one's",
    )
    add("--model", metavar="NAME", help="as the endpoints call it (default: theirs)")
    add("--chat", action="store_true", help="ask /v1/chat/completions")
    when = parser.add_argument_group("when requests come")
    when.add_argument(
        "--arrivals", choices=(*ARRIVALS, "trace"), default="poisson", help="(default poisson)"
    )
    when.add_argument(
        "--rate", type=_rates, default=(1.0,), metavar="R,R", help="requests/s (default 1)"
    )
    when.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gamma distribution: below 1 in bursts, above 1 evenly (default 1)",
    )
    when.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="with --arrivals trace: a trace's seconds last F (default 1; 0.5 is twice the rate)",
    )
    many = when.add_mutually_exclusive_group()
    many.add_argument("--requests", type=count, metavar="N", help=f"(default {REQUESTS})")
    many.add_argument("--seconds", type=float, metavar="S", help="as many as come in S seconds")
    what = parser.add_argument_group("what is asked")
    what.add_argument(
        "--trace", metavar="NAME|FILE", help=f"lengths of a trace: a file, {', '.join(SAMPLES)}"
    )
    what.add_argument("--length-scale", type=float, default=1.0, metavar="F", help="of the trace's")
    what.add_argument("--prompt-tokens", type=count, default=64, metavar="N", help="(default 64)")
    what.add_argument("--output-tokens", type=count, default=64, metavar="N", help="(default 64)")
    what.add_argument("--max-prompt-tokens", type=count, metavar="N", help="cut longer ones")
    what.add_argument("--max-output-tokens", type=count, metavar="N", help="cut longer ones")
    what.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default 0)")
    what.add_argument(
        "--respect-eos",
        action="store_true",
        help="leave out ignore_eos, which not every server knows: answers may be shorter",
    )
    what.add_argument(
        "--body", type=_fields, default={}, metavar="JSON", help="more request fields"
    )
    add(
        "--slo",
        "--goodput",
        type=objective,
        action="extend",
        nargs="+",
        default=[],
        metavar="MEASURE:MS",
        help="goodput counts requests within all of them: ttft:200 tpot:50 e2e:3000 itl_p99:50",
    )
    add("--warm-up", type=int, default=WARM_UP, metavar="N", help=f"(default {WARM_UP})")
    add("--timeout", type=float, default=TIMEOUT_SECONDS, metavar="S")
    add(
        "--late-limit",
        type=float,
        default=LATE_LIMIT_MS,
        metavar="MS",
        help=f"p99 by which the client may be late (default {LATE_LIMIT_MS:g})",
    )
    add("--key-variable", metavar="NAME", help="environment variable with the API key")
    add_common_arguments(parser, runs=1, quick_runs=1, seed=SEED)
    add("--html", type=Path, metavar="FILE", help="write a page with plots there")


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give requests per second, for example 1,2,4")
    return found


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("give a JSON object")
    return found
