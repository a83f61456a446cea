"""A server's streams, read with nothing but the standard library: these commands start at once."""

from __future__ import annotations

import argparse
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

from lexshard.serve_app.commands.status import (
    KEY_VARIABLE,
    add_server_address,
    opened,
    own_words,
    reason,
)

DATA, DONE = b"data: ", b"[DONE]"


class RefusedError(Exception):
    """What a server says of a request that it does not answer, or that none answers there."""


def chunks(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the events of one stream of the server at ``url`` hold; leaving early ends the reply.

    Raises:
        RefusedError: in the server's own words, or why it cannot be asked.
    """
    url = url.rstrip("/")
    try:
        asked = json.dumps(body | {"stream": True}, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # half a character, or no number
        raise RefusedError(f"that cannot be sent: {error}") from error
    try:
        with opened(url, path, asked) as reply:
            yield from _events(reply)
    except HTTPError as error:
        raise RefusedError(_refusal(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise RefusedError(f"no server answers at {url}: {reason(error)}") from error
    except ValueError as error:  # JSON that is none
        raise RefusedError(f"what answers at {url} is no server of models") from error


def _events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith(DATA):
            continue
        data = line.removeprefix(DATA).strip()
        if data == DONE:
            return
        event = json.loads(data)
        if "error" in event:
            raise RefusedError(event["error"]["message"])
        yield event
    raise RefusedError("the reply broke off: the server ended the connection")


def _refusal(error: HTTPError) -> str:
    message = own_words(error) or f"the server answers {error.code}"
    return f"{message} (set {KEY_VARIABLE})" if error.code == 401 else message


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
    add_server_address(parser)
    parser.add_argument("--model", metavar="NAME", help="one of its names (default: the first)")
    for name, (kind, meaning) in SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="N", help=meaning)


def request_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as fields of a request."""
    given = {name: getattr(arguments, name) for name in ("model", *SAMPLING)}
    return {name: value for name, value in given.items() if value is not None}
