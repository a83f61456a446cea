"""Is the server on this machine ready? Asked over HTTP, as everybody else would."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable

from cluster.config import ServeConfig

POLL_SECONDS = 0.5


class StartupError(Exception):
    """The server cannot start, with one line that says why."""


def wait_until_ready(config: ServeConfig, tell: Callable[[str], None]) -> None:
    """Polls ``/health``, telling every new reason for waiting.

    Raises:
        StartupError: the engine will never be ready.
    """
    told = ""
    while True:
        status, reason, hopeful = _health(config)
        if status == 200:
            return
        if not hopeful:
            raise StartupError(reason)
        if reason != told:
            tell(reason)
            told = reason
        time.sleep(POLL_SECONDS)


def _health(config: ServeConfig) -> tuple[int, str, bool]:
    """Status, reason, and whether waiting makes sense."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    connection = http.client.HTTPConnection(host, config.port, timeout=10)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        return 0, f"not reachable yet: {error}", True
    finally:
        connection.close()
    if response.status == 200:
        return 200, "", True
    return response.status, body["error"]["message"], "Retry-After" in response.headers
