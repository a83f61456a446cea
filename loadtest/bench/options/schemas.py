"""The options of ``lexshard bench schemas``."""

from __future__ import annotations

import argparse
from pathlib import Path

from lexshard.loadtest.bench.frame import add_common_arguments, add_threads, count, numbers

SCHEMAS, QUICK_SCHEMAS = 1500, 100
REQUESTS = (1, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/lexshard-demo"), metavar="DIR")
    add(
        "--folder",
        type=Path,
        required=True,
        metavar="DIR",
        help="of files with a schema and tests, as maskbench/data of guidance-ai/jsonschemabench",
    )
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="what llguidance says of each file: json_stats/expected_maskbench.json of its sources",
    )
    add(
        "--schemas",
        type=count,
        metavar="N",
        help=f"how many, chosen by the seed (default {SCHEMAS}, quick {QUICK_SCHEMAS})",
    )
    add(
        "--requests",
        type=numbers,
        default=REQUESTS,
        metavar="N,N",
        help="at once, each under another of the schemas, beside as much free text (default 1,16)",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    add("--temperature", type=float, default=0.8, metavar="T", help="default 0.8")
    add("--held-only", action="store_true", help="measure no speed")
    add_threads(parser)
    add_common_arguments(parser, runs=5, quick_runs=1, seed=7)
