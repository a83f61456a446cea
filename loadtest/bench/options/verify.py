"""The options of ``lexshard bench verify``."""

from __future__ import annotations

import argparse

from lexshard.loadtest.bench.frame import add_common_arguments, add_threads, names_of, numbers

# How far a drafter's logits are from the target's: the deviation of what is added to each.
AGREEMENTS = {"same": 0.0, "close": 0.5, "far": 2.0}
VOCABULARY = (32_768, 131_072, 151_936, 262_144)
GAMMA, BATCH = (1, 3, 5, 8), (1, 4, 16)
# Alpha and beta of the sigmoids.
LIMITS = ((-1.0, 1.0), (-10.0, 10.0), (-1e3, 1e3), (-1e4, 1e4))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--vocabulary", "-V", type=numbers, default=VOCABULARY, metavar="N,N")
    add("--gamma", type=numbers, default=GAMMA, metavar="N,N", help="drafts of a sequence")
    add("--batch", type=numbers, default=BATCH, metavar="N,N")
    add(
        "--agreement",
        type=names_of(AGREEMENTS),
        default=("close",),
        metavar="A,B",
        help=f"of drafter and target: {', '.join(AGREEMENTS)} (default close)",
    )
    add_threads(parser)
    add_common_arguments(parser, runs=9, quick_runs=3, seed=17)
