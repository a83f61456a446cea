"""``lexshard index show``: what an index file says about itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from lexshard.actors.index.container import read_header
from lexshard.actors.index.errors import IndexFileError
from lexshard.actors.index.report import describe

REFUSALS = (IndexFileError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("file", type=Path, metavar="FILE", help="index file")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    print(describe(arguments.file, read_header(arguments.file).metadata()))
    return 0
