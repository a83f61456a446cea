"""The options of ``lexshard bench vllm-plugin``."""

from __future__ import annotations

import argparse
from pathlib import Path

from lexshard.loadtest.bench.frame import (
    add_common_arguments,
    add_threads,
    count,
    names_of,
    numbers,
)
from lexshard.loadtest.bench.options.sampler import SETTINGS

DTYPES = ("bfloat16", "float32")
CONTROLS = ("greedy", "temperature", "topk", "topp", "penalties", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--vllm-python",
        type=Path,
        required=True,
        metavar="PATH",
        help="interpreter of an environment that has vLLM for CPUs and lexshard",
    )
    add("--model", type=Path, metavar="DIR", help="a checkpoint (default: the demo)")
    add(
        "--shape",
        choices=("demo", "large-vocabulary"),
        default="demo",
        help="large-vocabulary: 262,144 tokens, random weights of 268M parameters",
    )
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--requests", type=numbers, default=(1, 8), metavar="N,N")
    add(
        "--controls",
        type=names_of(SETTINGS),
        default=CONTROLS,
        metavar="A,B",
        help=f"{', '.join(SETTINGS)} (default {','.join(CONTROLS)})",
    )
    add("--steps", type=count, default=40, metavar="N", help="tokens of each request in a run")
    add_threads(parser)
    add_common_arguments(parser, runs=9, quick_runs=3, seed=17)
