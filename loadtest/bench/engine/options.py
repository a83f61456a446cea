"""The options of ``lexshard bench engine``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from lexshard.actors.configuration import DEFAULT_TIERS, DraftHeadChoice, TierName

REQUESTS, SHAPE_REQUESTS = (1, 4, 16), (1, 8)
RUNS, QUICK_RUNS = 5, 2
PAIRS, QUICK_PAIRS = 5, 1
REPEATS, QUICK_REPEATS = 3, 1
SEED = 17


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "--model",
        default="models/lexshard-demo",
        metavar="MODEL",
        help="folder, or ORG/NAME on the Hub",
    )
    parser.add_argument(
        "--requests",
        type=_counts,
        metavar="N,N",
        help="numbers of concurrent requests (default 1,4,16; with --shape 1,8)",
    )
    parser.add_argument(
        "--shape",
        choices=("large-vocabulary",),
        help="random weights of these dimensions instead of --model: 18 layers, V=262,144",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of every engine (default float32; with --shape bfloat16)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="of the model, in every engine; pinned"
    )
    parser.add_argument("--body", choices=("auto", "general", "fused"), default="auto")
    parser.add_argument(
        "--head", choices=("auto", "certified", "paper", "dense"), default="auto", help="ours"
    )
    parser.add_argument(
        "--draft",
        metavar="DIR",
        help="draft model of ours, of generate (assisted, one request at a time) and of vLLM",
    )
    parser.add_argument(
        "--draft-head",
        choices=get_args(DraftHeadChoice),
        default="auto",
        help="what ours looks at (default auto)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="of every request, each with a seed of its own; above 0 only against ours (default 0)",
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of every request")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of every request")
    parser.add_argument(
        "--draft-tokens",
        type=int,
        default=3,
        metavar="N",
        help="how far vLLM drafts; ours and generate choose by themselves (default 3)",
    )
    parser.add_argument(
        "--against",
        choices=("generate", "dense", "samplers", "plain"),
        help="in one process: transformers' generate, ours with a dense head, ours with one "
        "sampler process, which gets a core of its own, or ours without --draft (default generate; "
        "with --shape dense, with --draft plain)",
    )
    parser.add_argument(
        "--tiers",
        type=_names,
        default=DEFAULT_TIERS,
        metavar="A,B",
        help="what may screen: int8, int4, int4-dither, 1-bit (default int8,int4)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help=f"runs of each engine, and process pairs (default {RUNS}, --quick {QUICK_RUNS} and "
        f"{QUICK_PAIRS})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the same cases, fewer runs: under a minute, vLLM adds its own start",
    )
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="of the requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter of an environment that has vLLM for CPUs: measure against it too",
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(get_args(TierName)):
        raise argparse.ArgumentTypeError(f"{text!r}: choose among {', '.join(get_args(TierName))}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give positive numbers, for example 1,4,16")
    return counts
