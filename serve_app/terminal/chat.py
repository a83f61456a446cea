"""``lexshard chat``: a conversation with a model that a server has."""

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

PATH = "/v1/chat/completions"
ANEW = "/clear"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "message",
        nargs="?",
        help="answered once; without it what is piped in is, or what is typed, as a conversation "
        f"that {ANEW} begins anew",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_server_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until there is no more to answer; the exit status."""
    streams, fields = ServerStreams(arguments.url), request_fields(arguments)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = [*system]
    status = 0
    for text in texts(arguments.message):
        if text.strip() == ANEW:
            messages = [*system]
            continue
        messages.append({"role": "user", "content": text})
        try:
            said = show(_pieces(streams.chunks(PATH, {**fields, "messages": messages})))
            messages.append({"role": "assistant", "content": said})
            status = 0
        except RefusedError as error:
            print(f"lexshard: {error}", file=sys.stderr)
            messages.pop()
            status = 1
    return status


def _pieces(chunks: Iterator[dict[str, Any]]) -> Generator[tuple[str, bool], None, None]:
    """The texts of a reply, and whether each is a thought."""
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning"):
                yield thought, True
            if said := delta.get("content"):
                yield said, False
