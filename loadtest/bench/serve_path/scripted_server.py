"""A server whose engine computes nothing, run as `lexshard serve` would run it: in plain processes,
or on Ray where its options ask for that.

Its arguments are a rate and a `ServeConfig` as JSON; it serves until it is told to stop.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

from lexshard.cluster.config import ServeConfig
from lexshard.loadtest.bench.serve_path.scripted_main import RATE
from lexshard.serve_app.start.embedded import ServerModules, serve_embedded
from lexshard.serve_app.start.stopping import StopRequest

ENGINE_MODULE = "lexshard.loadtest.bench.serve_path.scripted_main"
STOP_SECONDS = 10.0


def main() -> int:
    """The exit code, when everything has ended."""
    config = ServeConfig.model_validate_json(sys.argv[2])
    stop = StopRequest()
    stop.listen()
    if config.on_ray:
        _serve_on_ray(config, stop, float(sys.argv[1]))
        return 0
    os.environ[RATE] = sys.argv[1]
    return serve_embedded(config, stop, ServerModules(engine=ENGINE_MODULE))


def _serve_on_ray(config: ServeConfig, stop: StopRequest, tokens_per_second: float) -> None:
    from lexshard.loadtest.bench.serve_path.scripted_engine import connect_scripted
    from lexshard.serve_app.start.launch import running_server
    from lexshard.serve_app.start.readiness import wait_until_ready

    connect = partial(connect_scripted, tokens_per_second=tokens_per_second)
    stopped = threading.Event()
    stop.then(stopped.set)
    with running_server(config, connect) as handle:
        from lexshard.serve_app.deployment import ask_all

        wait_until_ready(config, lambda _: None, partial(ask_all, handle))
        stopped.wait()
        ask_all(handle, "shut_down", 0, seconds=STOP_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
