"""The options of ``lexshard bench head``."""

from __future__ import annotations

import argparse

from lexshard.loadtest.bench.frame import add_common_arguments, add_threads, names_of, numbers

# By name: the keys of `synthetic.head_workload.SAMPLING_METHODS`, which takes seconds to import.
NEEDS = ("greedy", "gumbel", "top50", "minp")
TIERS = ("int8", "int4", "int4-dither", "1-bit")
VOCABULARY, COLUMNS = 131_072, 1_024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocabulary", "-V", type=int, default=VOCABULARY, metavar="N")
    add("--columns", "-d", type=int, default=COLUMNS, metavar="N")
    add("--batch", type=numbers, default=(1, 8, 32), metavar="N,N")
    add("--need", type=names_of(NEEDS), default=("greedy", "gumbel", "top50"), metavar="A,B")
    add("--tier", choices=("auto", "any", *TIERS, "dense"), default="auto")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add_threads(parser)
    add_common_arguments(parser, runs=15, quick_runs=3, seed=17)
