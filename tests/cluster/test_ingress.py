"""HAProxy as Serve configures it, made fit for strangers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cluster.ingress import (
    HEADER_SECONDS,
    fit_for_clients,
    haproxy_binary,
    ingress_environment,
)
from tests.support.paths import ROOT
from tests.support.real_server import free_port

BINARY = haproxy_binary()
pytestmark = pytest.mark.skipif(BINARY is None, reason="no HAProxy comes with Ray Serve here")


def serves_configuration(backend_port: int, frontend_port: int) -> str:
    """What this version of Serve writes for one replica on ``backend_port``."""
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
replica = ServerConfig(name="replica", host="127.0.0.1", port={backend_port})
reserve = ServerConfig(name="reserve", host="127.0.0.1", port={backend_port})
backends = {{"a": BackendConfig(name="a", path_prefix="/", app_name="lexshard", servers=[replica],
                               fallback_server=reserve)}}
api = HAProxyApi(cfg=config, backend_configs=backends, config_file_path=str(folder / "cfg"))
api._generate_config_file_internal()
print((folder / "cfg").read_text())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout


left = threading.Event()


class Replica(BaseHTTPRequestHandler):
    """Tells the headers it was sent, or says nothing and listens to who asks; ``left`` is set once
    that one has gone."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({name.lower(): value for name, value in self.headers.items()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n")
        try:
            gone = self.connection.recv(1) == b""
        except OSError:
            gone = True
        if gone:
            left.set()
        self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def running_ingress(folder: Path, *, replica: bool) -> Iterator[int]:
    """HAProxy, started as Serve starts it; yields its port."""
    assert BINARY is not None
    port = free_port()
    backend = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    backend_port = backend.server_address[1]
    if replica:
        threading.Thread(target=backend.serve_forever, daemon=True).start()
    else:
        backend.server_close()
    configuration = folder / "haproxy.cfg"
    configuration.write_text(serves_configuration(backend_port, free_port()))
    environment = ingress_environment(BINARY, folder, "127.0.0.1", port)
    process = subprocess.Popen(
        [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(configuration)],
        cwd=ROOT,
        env=os.environ | environment,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()
        if replica:
            backend.shutdown()
            backend.server_close()


def ask(port: int, request: bytes, seconds: float = HEADER_SECONDS + 5) -> tuple[str, str]:
    """The status line and the body."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body.decode()


def get(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_ingress(tmp_path_factory.mktemp("ingress"), replica=True) as port:
        yield port


def test_the_replica_learns_who_asks_and_clients_cannot_pretend(ingress: int) -> None:
    status, body = ask(ingress, get("/v1/models", "X-Forwarded-For: 6.6.6.6", "X-A: b"))
    assert status == "HTTP/1.1 200 OK"
    told = json.loads(body)
    assert told["x-forwarded-for"] == "127.0.0.1"
    assert told["x-a"] == "b"


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/%2d/routes", "/%2D%2Fhealthz"])
def test_serves_own_paths_are_not_there(ingress: int, path: str) -> None:
    status, body = ask(ingress, get(path))
    assert status == "HTTP/1.1 404 Not Found"
    assert json.loads(body)["error"]["code"] == 404


@pytest.mark.parametrize("path", ["/stream", "/whole"])
def test_a_client_that_leaves_is_noticed(ingress: int, path: str) -> None:
    left.clear()
    with socket.create_connection(("127.0.0.1", ingress)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n".encode())
        time.sleep(0.2)  # the body in a packet of its own, as httpx sends it
        connection.sendall(b"{}")
        time.sleep(0.5)
        assert not left.is_set()
    assert left.wait(2)


def test_large_headers_are_refused(ingress: int) -> None:
    status, _ = ask(ingress, get("/v1/models", "X-Large: " + "x" * 100_000))
    assert status.startswith("HTTP/1.1 400")


def test_headers_that_do_not_end_are_waited_for_ten_seconds(ingress: int) -> None:
    """Fifty of them at once, and meanwhile others are served."""
    started = time.monotonic()
    half = [socket.create_connection(("127.0.0.1", ingress)) for _ in range(50)]
    for connection in half:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    assert ask(ingress, get("/v1/models"))[0] == "HTTP/1.1 200 OK"
    for connection in half:
        connection.settimeout(HEADER_SECONDS + 5)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
    assert HEADER_SECONDS - 1 < time.monotonic() - started < HEADER_SECONDS + 5


def test_nothing_else_is_opened(ingress: int) -> None:
    """Serve's statistics and metrics would be open to every interface."""
    for port in (8404, 9101):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=1)


def test_without_a_replica_there_is_a_clear_answer_at_once(tmp_path: Path) -> None:
    with running_ingress(tmp_path, replica=False) as port:
        started = time.monotonic()
        status, body = ask(port, get("/v1/models"))
        assert time.monotonic() - started < 3
        assert status == "HTTP/1.1 503 Service Unavailable"
        assert json.loads(body)["error"]["type"] == "ServiceUnavailableError"


def test_a_configuration_of_another_kind_is_no_basis() -> None:
    with pytest.raises(ValueError, match="has changed"):
        fit_for_clients("global\n    maxconn 10\nfrontend other\n", Path("/nowhere"), "x:1")
