"""``lexshard complete``: how a model that a server has goes on with a text."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from typing import Any

from lexshard.serve_app.terminal.client import add_server_options, chunks, request_fields
from lexshard.serve_app.terminal.screen import answered, texts

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
    fields = request_fields(arguments)
    said: str | None = ""
    for text in texts(arguments.prompt):
        body = {**fields, "prompt": text}
        said = answered(_pieces(chunks(arguments.url, PATH, body)))
    return 1 if said is None else 0


def _pieces(events: Iterator[dict[str, Any]]) -> Generator[tuple[str, bool], None, None]:
    for chunk in events:
        for choice in chunk["choices"]:
            if choice["text"]:
                yield choice["text"], False
