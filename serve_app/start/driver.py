"""The Ray driver of a server, as `serve_app.start.server_process` starts it.

Standard input brings the configuration as one line of JSON (keys must not show in the list of
processes) and stays open: its end is the request to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.joining import JoinError, own_raylet
from lexshard.cluster.leaving import abandon_ray
from lexshard.cluster.process_tree import die_with_parent, leave
from lexshard.serve_app.engine_client import EngineConnector
from lexshard.serve_app.start.banner import banner
from lexshard.serve_app.start.launch import running_server
from lexshard.serve_app.start.readiness import StartupError, wait_until_ready

# For clients that are told that their streams stop, after their grace.
FAREWELL_SECONDS = 10.0
LAST_LINES_SECONDS = 0.5  # until what processes of Ray's have printed last is printed here, too


class Driver:
    """Starts a server, says when it is ready, and shuts it down. ``connect`` None starts a real
    engine."""

    def __init__(self, config: ServeConfig, connect: EngineConnector | None) -> None:
        self._config = config
        self._connect = connect
        self._start_time = time.monotonic()
        self._ready = False
        self._stop = threading.Event()

    def serve(self) -> None:
        """Returns when the server has been told to stop and has done so.

        Raises:
            StartupError: its engine will never be ready.
            RuntimeError: it could not be started.
        """
        config = self._config
        threading.Thread(target=self._wait_for_the_end, daemon=True).start()
        with running_server(config, self._connect, self._tell) as handle:
            # With it comes Ray, which is ready only now.
            from lexshard.serve_app.deployment import ask_all

            self._tell("the application runs; waiting for the engine")
            wait_until_ready(config, self._tell, partial(ask_all, handle))
            information = handle.information.remote().result()
            has_chat = handle.has_chat_template.remote().result()
            print(banner(config, information, has_chat), flush=True)
            self._ready = True
            if config.address is not None:
                threading.Thread(target=self._watch_node, daemon=True).start()
            self._stop.wait()
            grace = config.shutdown_grace_seconds
            ask_all(handle, "shut_down", grace, seconds=grace + FAREWELL_SECONDS)
            if config.address is None:  # which then ends at once, with what it has to print
                time.sleep(LAST_LINES_SECONDS)

    def _wait_for_the_end(self) -> None:
        sys.stdin.read()
        if not self._ready:  # no client is served: there is none to be told
            if self._config.address is not None:
                abandon_ray()
            os._exit(0)
        self._stop.set()

    def _watch_node(self) -> None:
        """Of a cluster that was joined: calls to Ray may wait for ever for one that has gone."""
        raylet = own_raylet()
        raylet.wait()
        if not self._stop.is_set():
            try:
                print(f"lexshard: Ray's raylet (process {raylet.pid}) has ended", file=sys.stderr)
            finally:  # also where what read it has gone
                os._exit(1)

    def _tell(self, message: str) -> None:
        print(f"[{time.monotonic() - self._start_time:5.1f} s] {message}", flush=True)


def main(connect: EngineConnector | None = None) -> int:
    """Serves what standard input says; the exit code."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = ServeConfig.model_validate_json(sys.stdin.readline(), strict=True)
    try:
        Driver(config, connect).serve()
    except (StartupError, JoinError) as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        print(f"lexshard: the server could not start: {lines[-1].strip()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(main())
