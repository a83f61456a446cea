"""The process that owns a server: it tells what is going on, ends it, and ends with it.

The server is started and used in a thread of its own, because calls into Ray may wait for a
cluster that is gone. The main thread waits for nothing: it hears signals, looks whether Ray is
alive, and leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

import psutil

from cluster.config import ServeConfig
from cluster.process_tree import adopt_orphans, end_descendants
from serve_app.banner import banner
from serve_app.launch import running_server
from serve_app.readiness import wait_until_ready

LOOK_SECONDS = 0.25
# What Ray and Serve may take to end after the open streams have had their time.
SHUTDOWN_SECONDS = 20.0
RAY_PROCESSES = ("gcs_server", "raylet")
INTERRUPTED = 130


class ClusterLostError(Exception):
    """A process of Ray's own has ended, so nothing can be served any more."""


class StopRequest:
    """Set by the first SIGINT or SIGTERM; the second one ends everything at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def listen(self) -> None:
        """Take over both signals; call in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def _hear(self, signal_number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            end_at_once(INTERRUPTED)
        self._event.set()

    @property
    def made(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has been made; waits at most ``seconds`` for it."""
        return self._event.wait(seconds)


def end_at_once(exit_code: int) -> NoReturn:
    """Ends this process and all it started, without a word to anybody."""
    sys.stdout.flush()
    sys.stderr.flush()
    end_descendants()
    os._exit(exit_code)


class _ServerThread(threading.Thread):
    """Serves until ``stop`` is made; what went wrong is in ``error``."""

    def __init__(self, config: ServeConfig, stop: StopRequest, start_time: float) -> None:
        super().__init__(name="server", daemon=True)
        self.ready = False
        self.error: BaseException | None = None
        self._config = config
        self._stop_request = stop
        self._start_time = start_time

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.error = error

    def _serve(self) -> None:
        config = self._config
        with running_server(config, tell=self._tell) as handle:
            self._tell("the application runs; waiting for the engine")
            wait_until_ready(config, self._tell, self._stop_request.wait)
            information = handle.information.remote().result()
            has_chat = handle.has_chat_template.remote().result()
            print(banner(config, information, has_chat), flush=True)
            self.ready = True
            self._stop_request.wait()
            grace = config.shutdown_grace_seconds
            handle.shut_down.remote(grace).result(timeout_s=grace + SHUTDOWN_SECONDS)

    def _tell(self, message: str) -> None:
        print(f"[{time.monotonic() - self._start_time:5.1f} s] {message}", flush=True)


def serve_until_stopped(config: ServeConfig, stop: StopRequest) -> None:
    """Starts the server and stays until it is told to stop; then everything has ended.

    Raises:
        ClusterLostError: Ray is gone; what it left behind runs on until `end_at_once`.
        Exception: whatever kept the server from starting.
    """
    adopt_orphans()
    server = _ServerThread(config, stop, time.monotonic())
    server.start()
    watched: dict[str, psutil.Process] = {}
    deadline: float | None = None
    try:
        while server.is_alive():
            server.join(LOOK_SECONDS)
            if deadline is None and stop.made:
                if not server.ready:  # nobody is being served
                    return
                deadline = time.monotonic() + config.shutdown_grace_seconds + SHUTDOWN_SECONDS
            if deadline is None:
                _look_after_ray(watched)
            elif time.monotonic() > deadline:
                print("lexshard: Ray does not end; killing it", file=sys.stderr, flush=True)
                return
        if server.error is not None and not stop.made:
            raise server.error
    finally:
        if not isinstance(sys.exception(), ClusterLostError):
            end_descendants()


def _look_after_ray(watched: dict[str, psutil.Process]) -> None:
    """Raises:
    ClusterLostError: one of Ray's processes that was there before has ended.
    """
    for name, process in watched.items():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            raise ClusterLostError(f"Ray's {name} (process {process.pid}) has ended")
    if len(watched) < len(RAY_PROCESSES):
        for child in psutil.Process().children():
            name = child.name()
            if name in RAY_PROCESSES:
                watched[name] = child
