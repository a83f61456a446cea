"""The options of ``lexshard bench shards``."""

from __future__ import annotations

import argparse

from lexshard.loadtest.bench.head.options import GEOMETRIES
from lexshard.loadtest.bench.measurement import add_common_arguments, names_of, numbers
from lexshard.loadtest.bench.shards.published import LINKS, MEMORY_BANDWIDTH, Link

# By name: the keys of `workload.NEEDS`, which takes seconds to import.
NEEDS = ("greedy", "gumbel", "top50", "top-p")
RUNS, QUICK_RUNS = 5, 2
SEED = 19
VOCABULARY, COLUMNS = 131_072, 1_024
MODEL_HEADS = ((128_256, 8_192), (262_144, 5_376))  # Llama 3.1 70B, Gemma 3 27B
MODEL_BATCH = 8
# Of top-50 per token, where nothing was measured; every shard rescores as many rows.
CANDIDATES, RESCORED = 58.0, 64.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--vocabulary", "-V", type=int, default=VOCABULARY, metavar="N")
    parser.add_argument("--columns", "-d", type=int, default=COLUMNS, metavar="N")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="independent")
    parser.add_argument("--tier", choices=("int8", "int4"), default="int8", help="all shards'")
    parser.add_argument(
        "--shards", type=numbers, default=(1, 2, 4, 8), metavar="N,N", help="1 is always measured"
    )
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32), metavar="N,N")
    parser.add_argument(
        "--clusters",
        type=int,
        metavar="C",
        help="compare with CSV-Decode's exchange of as many clusters, made by k-means",
    )
    parser.add_argument("--need", type=names_of(NEEDS), default=NEEDS, metavar="A,B")
    add_common_arguments(parser, runs=RUNS, quick_runs=QUICK_RUNS, seed=SEED)
    model = parser.add_argument_group("the model, which is not a measurement")
    model.add_argument("--model-only", action="store_true", help="measure nothing")
    model.add_argument(
        "--model-head",
        type=_head,
        nargs="+",
        default=MODEL_HEADS,
        metavar="V,d",
        help="default 128256,8192 262144,5376",
    )
    model.add_argument("--model-batch", type=int, default=MODEL_BATCH, metavar="N")
    model.add_argument(
        "--memory-bandwidth",
        type=float,
        default=MEMORY_BANDWIDTH / 1e9,
        metavar="GB/s",
        help="default 3350",
    )
    model.add_argument(
        "--link",
        type=_link,
        nargs="+",
        default=LINKS,
        metavar="NAME=GB/s,US",
        help="one direction, and microseconds of a hop; default NVLink 4, PCIe 5, Ethernet",
    )
    model.add_argument(
        "--candidates", type=float, metavar="N", help=f"per token; default measured or {CANDIDATES}"
    )
    model.add_argument(
        "--rescored",
        type=float,
        metavar="N",
        help=f"rows per token and shard; default measured or {RESCORED}",
    )


def _head(text: str) -> tuple[int, int]:
    try:
        vocabulary, columns = (int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give V,d, as in 128256,8192") from error
    return vocabulary, columns


def _link(text: str) -> Link:
    name, _, figures = text.partition("=")
    try:
        bandwidth, base = (float(part) for part in figures.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give NAME=GB/s,microseconds, as in InfiniBand=50,8"
        ) from error
    return Link(name, 1e9 * bandwidth, base)
