"""A server with scripted engines, run as `serve_app.start.driver` is; see
`running_scripted_server`."""

from __future__ import annotations

import sys

from actors.messages import EngineStatistics, Request
from cluster.config import ServeConfig
from serve_app.start.driver import main
from tests.support.mock_engine import MockEngine, Script, ids

SECONDS_PER_TOKEN = 0.005


def scripted(request: Request) -> Script:
    """As many tokens as are asked for."""
    steps = [ids("x")] * request.parameters.max_tokens
    return Script(steps, finish_reason="length", seconds_per_step=SECONDS_PER_TOKEN)


def connect(config: ServeConfig) -> MockEngine:
    return MockEngine(script=scripted, statistics=EngineStatistics())


if __name__ == "__main__":
    sys.exit(main(connect))
