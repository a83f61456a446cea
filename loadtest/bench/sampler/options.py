"""The options of ``lexshard bench sampler``."""

from __future__ import annotations

import argparse
from pathlib import Path

from lexshard.loadtest.bench.measurement import add_common_arguments, names_of, numbers
from lexshard.loadtest.bench.sampler.settings import SETTINGS

VLLM, NAIVE, PARALLEL = "vllm", "naive torch", "parallel torch"
OFFLOADED, WITH_MAXIMA, HOT = "offloaded", "offloaded + maxima", "hot vocabulary"
CANDIDATES, COLD = "certified candidates", "candidates, cold caches"
RUNS, QUICK_RUNS = 9, 3
SEED = 17
VOCABULARY, BATCH, HISTORY = (151_936,), (1, 8, 32), (400,)
CONTROLS = ("all", "none")
VARIANTS = (NAIVE, PARALLEL, OFFLOADED, WITH_MAXIMA, HOT, CANDIDATES, COLD)
QUICK_VARIANTS = (NAIVE, OFFLOADED, WITH_MAXIMA, HOT, CANDIDATES, COLD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--vocabulary", "-V", type=numbers, default=VOCABULARY, metavar="N,N")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint's own logits instead, its own V"
    )
    parser.add_argument("--batch", type=numbers, default=BATCH, metavar="N,N")
    parser.add_argument(
        "--controls",
        type=names_of(SETTINGS),
        default=CONTROLS,
        metavar="A,B",
        help=f"{', '.join(SETTINGS)} (default {','.join(CONTROLS)})",
    )
    parser.add_argument(
        "--history", type=numbers, default=HISTORY, metavar="N,N", help="tokens before step 0"
    )
    parser.add_argument(
        "--variants",
        type=names_of(VARIANTS),
        metavar="A,B",
        help=f"{', '.join(VARIANTS)} (default all; quick without {PARALLEL})",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter of an environment that has vLLM for CPUs: measure against its sampler",
    )
    parser.add_argument(
        "--samplers",
        type=numbers,
        default=(),
        metavar="N,N",
        help="also so many samplers at a time, on as many cores",
    )
    add_common_arguments(parser, runs=RUNS, quick_runs=QUICK_RUNS, seed=SEED)
