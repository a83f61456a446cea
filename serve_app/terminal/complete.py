"""``lexshard complete``: how a model that a server has goes on with a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator
from typing import Any

from lexshard.serve_app.terminal.client import (
    RefusedError,
    ServerStreams,
    add_server_options,
    request_fields,
)
from lexshard.serve_app.terminal.screen import show, texts

PATH = "/v1/completions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "prompt",
        nargs="?",
        help="gone on with once; without it what is piped in is, or each text that is typed",
    )
    add_server_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Go on with texts until there is no more; the exit status."""
    streams, fields = ServerStreams(arguments.url), request_fields(arguments)
    status = 0
    for text in texts(arguments.prompt):
        try:
            show(_pieces(streams.chunks(PATH, {**fields, "prompt": text})))
            status = 0
        except RefusedError as error:
            print(f"lexshard: {error}", file=sys.stderr)
            status = 1
    return status


def _pieces(chunks: Iterator[dict[str, Any]]) -> Generator[tuple[str, bool], None, None]:
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["text"]:
                yield choice["text"], False
