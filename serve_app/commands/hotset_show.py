"""``lexshard hotset show``: what a hot-vocabulary file says about itself."""

from __future__ import annotations

import argparse
from pathlib import Path

REFUSALS = (ValueError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("file", type=Path, metavar="FILE", help="hot-vocabulary file")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    # With kernels, which a mistyped option should not wait for.
    from lexshard.actors.decision.hot_vocabulary.file import describe, read_hot_file

    print(describe(arguments.file, read_hot_file(arguments.file)))
    return 0
