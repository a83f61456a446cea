"""HAProxy as Serve configures it, made fit, with stand-ins for replicas behind it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

from lexshard.cluster.ingress import HEADER_SECONDS, haproxy_binary, ingress_environment
from lexshard.cluster.ports import free_port
from tests.support.paths import ROOT
from tests.support.real_server import wait


def serves_configuration(
    backend_ports: Sequence[int], frontend_port: int, environment: dict[str, str]
) -> str:
    """What this version of Serve writes for replicas on ``backend_ports``."""
    serves = (each for each in environment.items() if each[0].startswith("RAY_SERVE_"))
    settings = tuple(each for each in serves if "/" not in each[1])  # its paths are its own
    text = _serves_configuration(len(backend_ports), settings)
    names = {"48700": frontend_port, "FOLDER": tempfile.mkdtemp()}
    names |= {f"{48701 + i}": port for i, port in enumerate(backend_ports)}
    return re.sub("|".join(names), lambda found: str(names[found[0]]), text)


@cache
def _serves_configuration(replicas: int, settings: tuple[tuple[str, str], ...]) -> str:
    """The same for ports from 48700 on, which takes seconds: most of Ray is imported."""
    backend_ports, frontend_port = [48701 + i for i in range(replicas)], 48700
    program = f"""
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
import tempfile, pathlib
folder = pathlib.Path(tempfile.mkdtemp())
config = HAProxyConfig(
    http_options=HTTPOptions(host="127.0.0.1", port={frontend_port}),
    socket_path=str(folder / "admin"), server_state_base=str(folder),
    server_state_file=str(folder / "state"), metrics_enabled=False,
)
replicas = [ServerConfig(name=f"replica{{port}}", host="127.0.0.1", port=port)
            for port in {list(backend_ports)}]
reserve = ServerConfig(name="reserve", host="127.0.0.1", port={backend_ports[0]})
backends = {{"a": BackendConfig(name="a", path_prefix="/", app_name="lexshard", servers=replicas,
                               fallback_server=reserve)}}
api = HAProxyApi(cfg=config, backend_configs=backends, config_file_path=str(folder / "cfg"))
api._generate_config_file_internal()
print((folder / "cfg").read_text().replace(str(folder), "FOLDER"))
"""
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, env=os.environ | dict(settings), text=True)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def running_ingress(
    folder: Path, backend_ports: Sequence[int], routing: Literal["prefix", "load"] = "load"
) -> Iterator[int]:
    """HAProxy, started as Serve starts it; yields its port."""
    binary = haproxy_binary()
    assert binary is not None
    port = free_port()
    environment = ingress_environment(
        binary, folder, "127.0.0.1", port, len(backend_ports), routing=routing
    )
    configuration = folder / "haproxy.cfg"
    configuration.write_text(serves_configuration(backend_ports, free_port(), environment))
    process = subprocess.Popen(
        [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(configuration)],
        cwd=ROOT,
        env=os.environ | environment,
    )
    try:
        wait(lambda: listens(port) or process.poll() is not None, 20, "HAProxy")
        assert process.poll() is None
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def replicas_to_kill(count: int) -> Iterator[dict[int, subprocess.Popen[str]]]:
    """Yields them by their ports."""
    command = [sys.executable, "-m", "tests.support.replica_stand_in"]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield {int(each.stdout.readline()): each for each in processes if each.stdout}
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def ask(port: int, request: bytes, seconds: float = HEADER_SECONDS + 5) -> tuple[str, str]:
    """The status line and the body."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body.decode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class OpenStream:
    """A client of a stream that has begun; ``process`` is the replica's."""

    def __init__(self, port: int, body: bytes = b"{}") -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.connection.sendall(post("/stream", body))
        answer = b""
        while not (found := re.search(rb"\r\n\r\n8\r\n(\d{8})\r\n", answer)):
            answer += self.connection.recv(4096)
        self.process = int(found[1])

    def broken(self, seconds: float) -> bool:
        self.connection.settimeout(seconds)
        try:
            return self.connection.recv(1) == b""
        except TimeoutError:
            return False
