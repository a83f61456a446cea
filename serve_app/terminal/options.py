"""The options that both commands have, and the request fields they stand for."""

from __future__ import annotations

import argparse
from typing import Any

from lexshard.serve_app.commands.status import KEY_VARIABLE, server_address

# By the name of their field.
SAMPLING: dict[str, tuple[type[int] | type[float], str]] = {
    "max_tokens": (int, "tokens of a reply at most"),
    "temperature": (float, "0 takes the likeliest token; the model's own without it"),
    "top_p": (float, "choose among the likeliest with this probability together"),
    "top_k": (int, "choose among so many of the likeliest"),
    "min_p": (float, "choose among those at least so likely, relative to the likeliest"),
    "seed": (int, "the same seed gives the same tokens"),
}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Where to ask, which model, and how its tokens are chosen."""
    parser.add_argument(
        "--url",
        type=server_address,
        default="http://127.0.0.1:8000",
        help="of the server, or HOST:PORT or :PORT (default %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="one of its names (default: the first)")
    for name, (kind, meaning) in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="N", help=meaning)
    parser.epilog = f"A server with API keys is asked with the one in {KEY_VARIABLE}."


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as fields of a request."""
    given = {name: getattr(arguments, name) for name in ("model", *SAMPLING)}
    return {name: value for name, value in given.items() if value is not None}
