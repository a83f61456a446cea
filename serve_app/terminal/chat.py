"""``lexshard chat``: a conversation with a model that a server has."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator
from typing import Any

from lexshard.serve_app.terminal.client import add_server_options, chunks, request_fields
from lexshard.serve_app.terminal.screen import answered, texts

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
    fields = request_fields(arguments)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = [*system]
    said: str | None = ""
    for text in texts(arguments.message):
        if text.strip() == ANEW:
            messages = [*system]
            continue
        messages.append({"role": "user", "content": text})
        body = {**fields, "messages": messages}
        said = answered(_pieces(chunks(arguments.url, PATH, body)))
        if said is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": said})
    return 1 if said is None else 0


def _pieces(events: Iterator[dict[str, Any]]) -> Generator[tuple[str, bool], None, None]:
    """The texts of a reply, and whether each is a thought."""
    for chunk in events:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning"):
                yield thought, True
            if said := delta.get("content"):
                yield said, False
