"""The options of ``lexshard bench draft``."""

from __future__ import annotations

import argparse
from pathlib import Path

from lexshard.loadtest.bench.frame import add_threads

PROMPTS, QUICK_PROMPTS = 80, 10
TOKENS = 128
SEED = 1_000_003  # of the first prompt, the next one's is one more; none that trained a router
STEPS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, default=Path("models/lexshard-demo"), metavar="DIR")
    add("--draft", type=Path, default=Path("models/lexshard-demo-draft"), metavar="DIR")
    add(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of spec_bench_question.jsonl, mt_bench_question.jsonl, gsm8k_test.jsonl and "
        "HumanEval.jsonl.gz, as published; any of them",
    )
    add(
        "--prompts",
        type=int,
        metavar="N",
        help=f"of a task: default {PROMPTS}, quick {QUICK_PROMPTS}",
    )
    add("--tokens", type=int, default=TOKENS, metavar="N", help="after a prompt")
    add(
        "--gamma",
        type=int,
        default=STEPS,
        metavar="N",
        help=f"guesses of a draft (default {STEPS})",
    )
    add(
        "--shares",
        type=_shares,
        default=(),
        metavar="S,S",
        help="of the vocabulary, to compare heads of these sizes as well, for example 0.05,0.1",
    )
    add_threads(parser)
    add("--quick", action="store_true", help="fewer prompts")
    add("--seed", type=int, default=SEED, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write every figure there")


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(share) for share in text.split(","))
    if not all(0 < share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text} are not shares: give numbers above 0, at most 1")
    return shares
