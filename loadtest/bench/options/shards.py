"""The options of ``lexshard bench shards``."""

from __future__ import annotations

import argparse

from lexshard.loadtest.bench.frame import add_common_arguments, names_of, numbers

# By name: the keys of `shards.NEEDS`, which takes seconds to import.
NEEDS = ("greedy", "gumbel", "top50", "top-p")
VOCABULARY, COLUMNS = 131_072, 1_024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocabulary", "-V", type=int, default=VOCABULARY, metavar="N")
    add("--columns", "-d", type=int, default=COLUMNS, metavar="N")
    add("--tier", choices=("int8", "int4"), default="int8", help="all shards'")
    add("--shards", type=numbers, default=(1, 2, 4, 8), metavar="N,N", help="1 is always measured")
    add("--batch", type=numbers, default=(1, 8, 32), metavar="N,N")
    add("--need", type=names_of(NEEDS), default=NEEDS, metavar="A,B")
    add_common_arguments(parser, runs=5, quick_runs=2, seed=19)
