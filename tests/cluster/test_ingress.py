"""HAProxy as Serve configures it, made fit for strangers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from lexshard.cluster.ingress import (
    BODY_SECONDS,
    HEADER_SECONDS,
    LONGEST_STREAM_SECONDS,
    fit_for_clients,
    haproxy_binary,
    ingress_environment,
    with_last_replicas,
)
from lexshard.cluster.own_ingress import write_configuration
from lexshard.cluster.ports import free_port
from tests.support.http_stand_in import StandInHandler, serving
from tests.support.real_ingress import (
    OpenStream,
    ask,
    listens,
    post,
    replicas_to_kill,
    running_ingress,
    serves_configuration,
)
from tests.support.real_server import wait
from tests.support.replica_stand_in import ReplicaStandIn, left

BINARY = haproxy_binary()
pytestmark = pytest.mark.skipif(BINARY is None, reason="no HAProxy comes with Ray Serve here")


@contextmanager
def replica_in_this_process() -> Iterator[int]:
    """Yields its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ReplicaStandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def get(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with (
        replica_in_this_process() as backend_port,
        running_ingress(tmp_path_factory.mktemp("ingress"), [backend_port]) as port,
    ):
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
    assert json.loads(body)["error"]["code"] == "unknown_url"


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


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (["X-Large: " + "x" * 100_000], "400"),
        ([f"X-{number}: 1" for number in range(102)], "400"),
        (["nothing"], "400"),
        (["Transfer-Encoding: gzip, chunked"], "422"),
    ],
    ids=["large headers", "many headers", "no header", "an unknown encoding"],
)
def test_what_is_no_request_is_refused_in_haproxys_own_words(
    ingress: int, headers: list[str], expected: str
) -> None:
    """If this fails because it is JSON, docs/serving.md has to say so, and `loadtest.chaos`."""
    status, body = ask(ingress, get("/v1/models", *headers))
    assert status.startswith(f"HTTP/1.1 {expected} ")
    assert body.startswith("<html>")


@pytest.mark.slow
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
    with running_ingress(tmp_path, [free_port()]) as port:
        started = time.monotonic()
        status, body = ask(port, get("/v1/models"))
        assert time.monotonic() - started < 15
        assert status == "HTTP/1.1 503 Service Unavailable"
        assert json.loads(body)["error"]["type"] == "service_unavailable_error"


def test_streams_spread_by_how_many_a_replica_has(tmp_path: Path) -> None:
    with replicas_to_kill(3) as replicas, running_ingress(tmp_path, list(replicas)) as port:
        streams = [OpenStream(port) for _ in range(12)]
        counts = Counter(stream.process for stream in streams)
        assert sorted(counts.values()) == [4, 4, 4]
        emptied = streams[0].process
        for stream in streams:
            if stream.process == emptied:
                stream.connection.close()
        time.sleep(0.5)
        assert [OpenStream(port).process for _ in range(3)] == [emptied] * 3


def test_a_replica_that_dies_takes_its_own_streams_and_no_new_request(tmp_path: Path) -> None:
    """Connections to it stand open in HAProxy, and with no streams left it looks the least busy."""
    with replicas_to_kill(3) as replicas, running_ingress(tmp_path, list(replicas)) as port:
        for _ in range(12):
            assert ask(port, get("/v1/models"))[0] == "HTTP/1.1 200 OK"
        streams = [OpenStream(port) for _ in range(9)]
        victim, second, last = replicas.values()
        slowest = 0.0
        for dying in (victim, second):
            dying.kill()
            for _ in range(20):
                asked = time.monotonic()
                status, _ = ask(port, get("/v1/models"))
                slowest = max(slowest, time.monotonic() - asked)
                assert status == "HTTP/1.1 200 OK"
            gone = {victim.pid, second.pid} if dying is second else {victim.pid}
            for stream in streams:
                if stream.process in gone:
                    assert stream.broken(5)
                else:
                    assert not stream.broken(0.05)
        print(f"slowest answer after a death: {slowest * 1000:.0f} ms")
        assert slowest < 5
        assert {OpenStream(port).process for _ in range(6)} == {last.pid}


def test_a_request_that_its_replica_took_with_it_is_answered_by_another(tmp_path: Path) -> None:
    """Its body comes a moment after the headers, as most clients send it."""
    with replicas_to_kill(2) as replicas, running_ingress(tmp_path, list(replicas)) as port:
        busy = OpenStream(port)
        idle = next(each for each in replicas.values() if each.pid != busy.process)
        idle.send_signal(signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            request = post("/answer", b"{}", "Connection: close")
            connection.sendall(request[:-2])
            time.sleep(0.1)
            connection.sendall(request[-2:])
            time.sleep(0.3)  # it lies in the socket of one that will never read it
            idle.kill()
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["process"] == busy.process


class Away(StandInHandler):
    """A replica whose engine is not there."""

    def answer(self) -> None:
        self.say(503 if self.command == "POST" else 200, b"{}")


def test_a_replica_without_its_engine_leaves_requests_to_the_others(tmp_path: Path) -> None:
    """It is the quickest of all, and so the least busy."""
    with replicas_to_kill(1) as replicas, serving(Away) as url:
        away, [well] = int(url.rpartition(":")[2]), list(replicas)
        with running_ingress(tmp_path, [away, well]) as port:
            told = [ask(port, post("/answer", b"{}", "Connection: close"))[0] for _ in range(20)]
        assert set(told) == {"HTTP/1.1 200 OK"}


def test_a_body_announced_as_too_large_is_not_waited_for(tmp_path: Path) -> None:
    """Its replica refuses it: HAProxy waited a minute for its first bytes."""
    head = "POST /answer HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n{"
    with (
        socket.create_server(("127.0.0.1", 0)) as replica,
        running_ingress(tmp_path, [replica.getsockname()[1]]) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(head.encode())
        sent = time.monotonic()
        replica.settimeout(BODY_SECONDS / 3)
        asked = b""
        while not asked.startswith(b"POST /answer"):  # what is not is a look at its health
            assert time.monotonic() - sent < BODY_SECONDS / 3
            connection, _ = replica.accept()
            with connection:
                connection.settimeout(BODY_SECONDS / 3)
                asked = connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.slow
def test_a_body_that_does_not_end_is_waited_for_a_minute(ingress: int) -> None:
    half = post("/answer", b"{}", "Connection: close")[:-1]
    started = time.monotonic()
    status, body = ask(ingress, half, BODY_SECONDS + 5)
    assert time.monotonic() - started > BODY_SECONDS - 1
    assert status == "HTTP/1.1 408 Request Timeout"
    assert json.loads(body)["error"]["type"] == "timeout_error"


def test_streams_outlive_the_configuration_they_began_under(tmp_path: Path) -> None:
    """Serve starts a new HAProxy when replicas change; the old one stays for its streams."""
    environment = ingress_environment("haproxy", tmp_path, "127.0.0.1", 8000, 3)
    told = serves_configuration([1, 2, 3], 4, environment)
    kept = fit_for_clients(told, tmp_path, "127.0.0.1:8000")
    lines = {line.strip() for line in kept.splitlines()}
    assert {"balance leastconn", "retries 4", "option redispatch 1"} <= lines
    assert f"hard-stop-after {LONGEST_STREAM_SECONDS}s" in lines


def test_haproxy_says_why_it_does_not_start_and_nothing_else(tmp_path: Path) -> None:
    assert BINARY is not None
    binary, port = BINARY, free_port()

    def said(name: str) -> str:
        """Until it ends or answers, with an API process that listens at such a file."""
        written = write_configuration(tmp_path, "127.0.0.1", port, [str(tmp_path / name)])
        command = [sys.executable, "-m", "lexshard.cluster.own_ingress", binary, str(written)]
        haproxy = subprocess.Popen([*command, str(os.getpid())], stderr=subprocess.PIPE)
        while haproxy.poll() is None:
            time.sleep(0.05)
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                haproxy.terminate()
        return haproxy.communicate()[1].decode()

    assert said("api-0") == ""
    assert "unknown keyword 'b'" in said("a b")


def test_a_port_has_one_server(tmp_path: Path) -> None:
    port = free_port()
    written = write_configuration(tmp_path, "127.0.0.1", port, [str(tmp_path / "api")])
    command = [str(BINARY), "-db", "-f", str(written)]
    with subprocess.Popen(command) as first:
        try:
            wait(lambda: listens(port), 10, "the first")
            assert subprocess.run(command, timeout=10).returncode != 0
        finally:
            first.kill()


def test_a_configuration_of_another_kind_is_no_basis() -> None:
    with pytest.raises(ValueError, match="has changed"):
        fit_for_clients("global\n    maxconn 10\nfrontend other\n", Path("/nowhere"), "x:1")


def test_replicas_that_serve_forgets_while_it_builds_their_successors_are_kept(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "last"
    environment = ingress_environment("haproxy", tmp_path, "127.0.0.1", 8000, 2)
    one, two = (serves_configuration(ports, 4, environment) for ports in ([1, 2], [3]))
    none = "".join(
        line for line in one.splitlines(keepends=True) if not line.strip().startswith("server rep")
    )
    assert with_last_replicas(none, kept) == none  # none were there yet
    assert with_last_replicas(one, kept) == one
    assert with_last_replicas(none, kept) == one
    assert with_last_replicas(two, kept) == two
    assert with_last_replicas(none, kept) == two
