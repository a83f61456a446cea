"""The options of ``lexshard bench engine``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from lexshard.actors.configuration import DraftHeadChoice
from lexshard.loadtest.bench.frame import add_common_arguments, add_threads, numbers
from lexshard.loadtest.bench.synthetic.schemas import NAMES

REQUESTS, SHAPE_REQUESTS = (1, 4, 16), (1, 8)
REPEATS, QUICK_REPEATS = 3, 1  # of a process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        default="models/lexshard-demo",
        metavar="MODEL",
        help="folder, or ORG/NAME on the Hub",
    )
    add(
        "--requests",
        type=numbers,
        metavar="N,N",
        help="numbers of concurrent requests (default 1,4,16; with --shape 1,8)",
    )
    add(
        "--shape",
        choices=("large-vocabulary", "gemma3"),
        help="random weights of these dimensions instead of --model: 18 layers of 640, V=262,144, "
        "of the type llama, or as Gemma 3 270M is",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of every engine (default float32; with --shape bfloat16)",
    )
    add_threads(parser)
    add("--head", choices=("auto", "certified", "paper", "dense"), default="auto", help="ours")
    add(
        "--draft",
        metavar="DIR",
        help="draft model of ours, of generate (assisted, one request at a time) and of vLLM",
    )
    add(
        "--draft-head",
        choices=get_args(DraftHeadChoice),
        default="auto",
        help="what ours looks at (default auto)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="of every request, each with a seed of its own; above 0 only against ours (default 0)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="of every request")
    add("--top-p", type=float, default=1.0, metavar="P", help="of every request")
    add(
        "--draft-tokens",
        type=int,
        default=3,
        metavar="N",
        help="how far vLLM drafts; ours and generate choose by themselves (default 3)",
    )
    add(
        "--against",
        choices=("generate", "dense", "samplers", "plain", "free"),
        help="in one process: transformers' generate, ours with a dense head, ours with one "
        "sampler process, which gets a core of its own, ours without --draft, or ours without "
        "--schema (default generate; with --shape dense, with --draft plain, with --schema free)",
    )
    add(
        "--schema",
        choices=NAMES,
        help="ours must say an array of records, half of whose tokens are forced, or one long "
        "string; with --against free beside the same number of tokens of free text",
    )
    add_common_arguments(parser, runs=5, quick_runs=1, seed=17)
    add(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter of an environment that has vLLM for CPUs: measure against it too",
    )
    add(
        "--llama-bench",
        type=Path,
        metavar="DIR",
        help="folder of llama.cpp's llama-batched-bench: measure against it too, prompts and "
        "decoding apart; needs --dtype bfloat16 and the package gguf",
    )


def opponent(arguments: argparse.Namespace) -> str:
    """What ours takes turns with in one process."""
    default = "generate" if arguments.shape is None else "dense"
    if arguments.schema is not None:
        default = "free"
    elif arguments.draft is not None:
        default = "plain"
    against: str = arguments.against or default
    return against


def refuse_other_laws(arguments: argparse.Namespace) -> None:
    """Raises ValueError where engines would draw with noise of their own, or cannot draw."""
    if not 0 <= arguments.temperature < float("inf"):
        raise ValueError(f"--temperature {arguments.temperature}: give 0 or more")
    if arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        raise ValueError("--top-k is 0 (all) or more, --top-p above 0 and at most 1")
    if arguments.temperature == 0 and (arguments.top_k > 0 or arguments.top_p < 1):
        raise ValueError("--top-k and --top-p change nothing at temperature 0: give --temperature")
    others = opponent(arguments) == "generate" or arguments.vllm_python is not None
    if (arguments.schema is None) == (opponent(arguments) == "free"):
        raise ValueError("--schema goes with --against free, and --against free with --schema")
    dtype = arguments.dtype or ("float32" if arguments.shape is None else "bfloat16")
    if arguments.llama_bench is not None and (dtype != "bfloat16" or arguments.draft):
        raise ValueError(
            "llama.cpp gets the weights as bfloat16 and no draft model: give --dtype bfloat16, and "
            "no --draft"
        )
    if arguments.temperature > 0 and others:
        raise ValueError(
            "only our engines draw the same tokens above temperature 0: give --against plain, "
            "dense or samplers, and no --vllm-python"
        )
