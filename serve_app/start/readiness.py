"""Is the server on this machine ready? Asked over HTTP, as clients do, and then of each
of its API processes."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from lexshard.cluster.config import ServeConfig

POLL_SECONDS = 0.5
ANSWER_SECONDS = 10.0
Waiting = tuple[str, bool]
"""The reason, and whether waiting makes sense."""


class StartupError(Exception):
    """The server cannot start, with one line that says why."""


class AskAll(Protocol):
    """Calls a method of every API process (see `serve_app.deployment.ask_all`)."""

    def __call__(self, method: str, *, seconds: float) -> list[Any]: ...


def wait_until_ready(config: ServeConfig, tell: Callable[[str], None], ask_all: AskAll) -> None:
    """Polls until all API processes or replicas of ``config`` serve, telling every new reason for
    waiting.

    Raises:
        StartupError: the engine will never be ready.
    """
    told = ""
    while True:
        waiting = _at_the_door(config) or _behind_it(config, ask_all)
        if waiting is None:
            return
        reason, hopeful = waiting
        if not hopeful:
            raise StartupError(reason)
        if reason != told:
            tell(reason)
            told = reason
        time.sleep(POLL_SECONDS)


def _behind_it(config: ServeConfig, ask_all: AskAll) -> Waiting | None:
    answers: list[Waiting | None] = ask_all("waits_for", seconds=ANSWER_SECONDS)
    if config.has_replicas:
        expected, what = config.replicas, "replicas"
    else:
        expected, what = config.api_processes, "API processes"
    if len(answers) < expected:
        return f"{len(answers)} of {expected} {what} answer", True
    waiting = [answer for answer in answers if answer is not None]
    return min(waiting, key=lambda each: each[1], default=None)  # without hope before with it


def _connection(host: str, config: ServeConfig) -> http.client.HTTPConnection:
    if config.ssl_certfile is None:
        return http.client.HTTPConnection(host, config.port, timeout=ANSWER_SECONDS)
    # Its certificate names the server as clients know it, not as this machine's loopback.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, config.port, timeout=ANSWER_SECONDS, context=context)


def _at_the_door(config: ServeConfig) -> Waiting | None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    connection = _connection(host, config)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        return f"not reachable yet: {error}", True
    finally:
        connection.close()
    if response.status == 200:
        return None
    return body["error"]["message"], "Retry-After" in response.headers
