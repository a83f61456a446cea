"""A Ray cluster of one node that was there before, as `ray start --head` makes it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lexshard.cluster.lifecycle import ENVIRONMENT
from lexshard.cluster.ports import free_port
from tests.support.real_server import wait

CPUS = 4


def ray_environment() -> dict[str, str]:
    """Of commands that share a cluster on the loopback interface: with a token of their own, and
    without options of the person that runs the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LEXSHARD_")}
    return kept | ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def command(name: str) -> str:
    """``ray`` or ``serve`` of this Python."""
    return str(Path(sys.executable).with_name(name))


@contextmanager
def ray_head(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a cluster; what it says is kept in ``folder``."""
    port, log = free_port(), folder / "ray-log"
    start = [command("ray"), "start", "--head", "--block", "--port", str(port)]
    start += ["--node-ip-address", "127.0.0.1", "--num-cpus", str(CPUS)]
    start += ["--include-dashboard", "false", "--ray-client-server-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(start, env=environment, stdout=output, stderr=output)
    try:
        wait(
            lambda: "Ray runtime started" in log.read_text() or process.poll() is not None,
            120,
            "ray start",
        )
        assert process.poll() is None, log.read_text()
        yield f"127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
