"""What a bench is told on its command line."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable


def parsed(add_arguments: Callable[[ArgumentParser], None], *words: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)
