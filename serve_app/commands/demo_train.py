"""The command ``lexshard demo train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DEFAULT_SEED = 17


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of texts: *.txt, *.txt.xz (documents divided by a line <|endoftext|>) and "
        "*.jsonl, *.jsonl.xz (dialogues)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the two checkpoints go"
    )
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, metavar="N")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="where tokens and training checkpoints are kept, to resume from; one "
        "folder serves one data folder (default: OUT/work)",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="keep the target of this folder, made from the same texts with the same seed, and "
        "train its draft alone",
    )
    parser.add_argument("--target-tokens", type=int, metavar="N", help="token budget of the target")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="token budget of the draft")


def run(arguments: argparse.Namespace) -> int:
    """Train the pair; returns the exit status."""
    if arguments.target is not None and arguments.target_tokens is not None:
        print("error: a kept --target is not trained: leave --target-tokens out", file=sys.stderr)
        return 1
    # Seconds, with torch: a mistyped option should not wait for it.
    from lexshard.serve_app.demo.pipeline import train_demo
    from lexshard.serve_app.demo.recipe import DemoRecipe

    recipe = DemoRecipe().with_tokens(arguments.target_tokens, arguments.draft_tokens)
    try:
        result = train_demo(
            arguments.data, arguments.out, arguments.seed, arguments.work, recipe, arguments.target
        )
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rate = result["drawn_token_match_rate"]["mean"]
    bits = result["bits_per_byte"]["all"]["target"]
    print(f"target {bits:.3f} bits per byte; draft draws {100 * rate:.1f} % of its tokens")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m lexshard.serve_app.commands.demo_train``."""
    parser = argparse.ArgumentParser(prog="lexshard demo train", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
