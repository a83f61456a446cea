"""The process that owns a server: it hears signals, watches over Ray, and leaves nothing behind.

Calls into Ray may wait for a cluster that is gone, with the interpreter in their hands, so all of
them are made in a process of their own (`serve_app.start.driver`). This one imports nothing of
Ray's and waits for no process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

import psutil

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.process_tree import adopt_orphans, end_descendants
from lexshard.cluster.roles.process import command_of
from lexshard.serve_app.observability.logs import print_lines
from lexshard.serve_app.start.stopping import StopRequest

LOOK_SECONDS = 0.25
# What Ray and Serve may take to end after the open streams have had their time.
SHUTDOWN_SECONDS = 20.0
RAY_PROCESSES = ("gcs_server", "raylet")
FAREWELL_SECONDS = 3.0


class ClusterLostError(Exception):
    """A process of Ray's own has ended, so nothing can be served any more."""


def serve_until_stopped(config: ServeConfig, stop: StopRequest) -> int:
    """Starts the server and stays until it is told to stop; when it returns, with the driver's exit
    code, or raises, everything has ended.

    Raises:
        ClusterLostError: Ray has died.
    """
    adopt_orphans()
    told = subprocess.PIPE if config.log_format == "json" else None
    # A session of its own: a terminal's Ctrl-C is heard here alone.
    driver = subprocess.Popen(
        command_of("lexshard.serve_app.start.driver"),
        stdin=subprocess.PIPE,
        stdout=told,
        stderr=told and subprocess.STDOUT,
        start_new_session=True,
    )
    if driver.stdout is not None:
        threading.Thread(target=_pass_on, args=[driver.stdout], daemon=True).start()
    try:
        assert driver.stdin is not None
        driver.stdin.write(config.model_dump_json(by_alias=True).encode() + b"\n")
        driver.stdin.flush()
        _watch(driver, config, stop)
    finally:
        end_descendants()
    return driver.wait()


def _pass_on(output: IO[bytes]) -> None:
    """What any process of the server prints, one JSON object a line."""
    for line in output:
        with suppress(OSError):  # what read the log may have gone: the processes go on
            print_lines(line.decode(errors="replace"), "json")


def _watch(driver: subprocess.Popen[bytes], config: ServeConfig, stop: StopRequest) -> None:
    """Returns when the driver has ended, or should have.

    Raises:
        ClusterLostError: one of Ray's processes that was there before has ended.
    """
    watched: dict[str, psutil.Process] = {}
    deadline: float | None = None
    while driver.poll() is None:
        time.sleep(LOOK_SECONDS)
        if deadline is not None:
            if time.monotonic() > deadline:
                print("lexshard: Ray does not end; killing it", file=sys.stderr, flush=True)
                return
        elif stop.made:
            driver.stdin.close()  # type: ignore[union-attr]
            deadline = time.monotonic() + config.shutdown_grace_seconds + SHUTDOWN_SECONDS
        else:
            _look_after_ray(driver, watched)


def _look_after_ray(driver: subprocess.Popen[bytes], watched: dict[str, psutil.Process]) -> None:
    for name, process in watched.items():
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            with suppress(subprocess.TimeoutExpired):
                driver.wait(FAREWELL_SECONDS)  # it may have ended them itself, on its way out
                return
            raise ClusterLostError(f"Ray's {name} (process {process.pid}) has ended")
    if len(watched) < len(RAY_PROCESSES):
        with suppress(psutil.NoSuchProcess):  # one of them has ended: the next look will tell
            for child in psutil.Process(driver.pid).children():
                name = child.name()
                if name in RAY_PROCESSES:
                    watched[name] = child
