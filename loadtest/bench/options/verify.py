"""The options of ``lexshard bench verify``."""

from __future__ import annotations

import argparse

from lexshard.loadtest.bench.frame import add_common_arguments, add_threads, names_of, numbers

# How far a drafter's logits are from the target's: the deviation of what is added to each.
AGREEMENTS = {"same": 0.0, "close": 0.5, "far": 2.0}
VOCABULARY = (32_768, 131_072, 151_936, 262_144)
GAMMA, BATCH = (1, 3, 5, 8), (1, 4, 16)
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
    add(
        "--limits",
        type=_limits,
        default=LIMITS,
        metavar="A:B,A:B",
        help="alpha:beta of the sigmoids (default -1:1,-10:10,-1e3:1e3,-1e4:1e4)",
    )
    add_threads(parser)
    add_common_arguments(parser, runs=9, quick_runs=3, seed=17)


def _limits(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = tuple(tuple(map(float, part.split(":"))) for part in text.split(","))
    except ValueError:
        pairs = ()
    if not pairs or any(len(pair) != 2 or not pair[0] < 0 < pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: give alpha:beta, for example -10:10,-1e3:1e3")
    return pairs  # type: ignore[return-value]
