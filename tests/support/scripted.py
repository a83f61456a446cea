"""A server with scripted engines, told what to do as `serve_app.start.driver` is; see
`running_scripted_server`."""

from __future__ import annotations

import os
import signal
import sys
import threading

from lexshard.actors.messages import EngineStatistics, Request
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start.driver import main
from lexshard.serve_app.start.embedded import ServerModules, serve_embedded
from lexshard.serve_app.start.stopping import StopRequest
from tests.support.mock_engine import MockEngine, Script, ids

SECONDS_PER_TOKEN = 0.005


def scripted(request: Request) -> Script:
    """As many tokens as are asked for."""
    steps = [ids("x")] * request.parameters.max_tokens
    return Script(steps, finish_reason="length", seconds_per_step=SECONDS_PER_TOKEN)


def connect(config: ServeConfig) -> MockEngine:
    return MockEngine(script=scripted, statistics=EngineStatistics())


def serve_in_processes() -> int:
    """An engine for each API process, which are all there is."""
    stop = StopRequest()
    stop.listen()

    def hear() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    config = ServeConfig.model_validate_json(sys.stdin.readline(), strict=True)
    threading.Thread(target=hear, daemon=True).start()
    modules = ServerModules(api="tests.support.scripted_api_process", engine=None)
    return serve_embedded(config, stop, modules)


if __name__ == "__main__":
    sys.exit(main(connect) if sys.argv[1] == "ray" else serve_in_processes())
