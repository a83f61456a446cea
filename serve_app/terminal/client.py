"""A server's streams, read with nothing but the standard library: these commands start at once."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from lexshard.serve_app.commands.status import KEY_VARIABLE, reason

DATA, DONE = b"data: ", b"[DONE]"


class RefusedError(Exception):
    """What a server says of a request that it does not answer, or that none answers there."""


class ServerStreams:
    """The streams of the server at ``url``, asked with the key in ``LEXSHARD_API_KEY``."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # A server nearby is not asked through the proxy of the environment.
        self._opener: OpenerDirector = build_opener(ProxyHandler({}))

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What the events of one stream hold; leaving early ends the reply.

        Raises:
            RefusedError: in the server's own words, or why it cannot be asked.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        told = json.dumps(body | {"stream": True}).encode()
        try:
            with self._opener.open(Request(self._url + path, told, headers)) as reply:
                yield from _events(reply)
        except HTTPError as error:
            raise RefusedError(_refusal(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise RefusedError(f"no server answers at {self._url}: {reason(error)}") from error
        except ValueError as error:  # JSON that is none
            raise RefusedError(f"what answers at {self._url} is no server of models") from error


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


def _refusal(error: HTTPError) -> str:
    try:
        message = str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answers {error.code}"
    return f"{message} (set {KEY_VARIABLE})" if error.code == 401 else message
