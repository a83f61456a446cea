"""What is found out of a Ray cluster before it is joined: is it one, and who may come in?"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lexshard.cluster.ports import free_port
from tests.support.paths import ROOT
from tests.support.ray_head import ray_environment, ray_head

JOIN = """
import sys
from lexshard.cluster.joining import JoinError, join_ray
try:
    print("guarded" if join_ray(sys.argv[1], {}) else "open to all")
except JoinError as error:
    print(error)
"""
# What workers of a cluster find in their environment.
WORKERS_FIND = (
    JOIN
    + """
import ray
told = ray.remote(lambda: __import__("os").environ.get("LEXSHARD_CPU", "none"))
print(ray.get(told.remote()))
"""
)


def joined(address: str, environment: Mapping[str, str] | None = None, code: str = JOIN) -> str:
    """What is said of the cluster at ``address``, in a process of its own: it is joined there."""
    done = subprocess.run(
        [sys.executable, "-c", code, address],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr


@pytest.mark.slow
def test_what_listens_there_but_is_no_cluster_is_told_within_seconds() -> None:
    """Ray's own dashboard is such a one: Ray would try for minutes."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http, socket.socket() as silent:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (http.server_port, silent.getsockname()[1], free_port()):
            began = time.monotonic()
            told = joined(f"127.0.0.1:{port}")
            assert told.startswith(f"no Ray cluster answers at 127.0.0.1:{port}: "), told
            assert "not that of its dashboard" in told
            assert time.monotonic() - began < 20
        http.shutdown()


def test_what_is_no_address_is_told() -> None:
    for address in ("nonsense", "ray://127.0.0.1:10001"):
        assert joined(address).startswith(f"no Ray cluster answers at {address}: ")


@pytest.mark.slow
def test_a_cluster_with_a_token_is_told_from_one_that_is_open_to_all(tmp_path: Path) -> None:
    guarded = ray_environment()
    stranger = {key: value for key, value in guarded.items() if not key.startswith("RAY_AUTH")}
    stranger |= {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    wrong = guarded | {"RAY_AUTH_TOKEN": "0" * 64}
    with ray_head(tmp_path, guarded) as address:
        assert joined(address, guarded) == "guarded"
        for environment in (stranger, wrong, stranger | {"RAY_AUTH_MODE": "token"}):
            began = time.monotonic()
            told = joined(address, environment)
            assert told.startswith(f"the Ray cluster at {address} asks for its token: set RAY_AUTH")
            assert time.monotonic() - began < 20
    with ray_head(tmp_path, stranger | {"RAY_AUTH_MODE": "disabled"}) as address:
        assert joined(address, stranger) == "open to all"
        assert joined(address, guarded) == "open to all"


@pytest.mark.slow
def test_the_processor_that_a_server_is_told_is_that_of_every_node(tmp_path: Path) -> None:
    environment = ray_environment()
    with ray_head(tmp_path, environment) as address:
        assert joined(address, environment, WORKERS_FIND) == "none"
        told = environment | {"LEXSHARD_CPU": "vectors"}
        assert joined(address, told, WORKERS_FIND) == "vectors"
