"""What clients see of a server whose processes are killed and stopped, and what is left of it."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.backends import PROCESS_AND_RAY
from tests.support.faults import (
    SLOW_BODY,
    Listener,
    alive,
    ask,
    family,
    process_of,
    processes_of,
    seconds_until_served,
)
from tests.support.real_server import Server, healthy, running_server, wait

pytestmark = pytest.mark.slow

RECOVERY_SECONDS = 60  # `lexshard chaos` tells how long it takes: here it only has to come


@pytest.fixture(scope="module", params=PROCESS_AND_RAY)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faults")
    with running_server(folder, *SLOW_BODY, backend=request.param) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    """What the seeded stream says when nothing happens."""
    listener = Listener(server)
    listener.run()
    assert listener.done
    return listener.text


def test_only_the_ingress_listens_and_only_on_loopback(server: Server) -> None:
    for process in family(server):
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                address = connection.laddr.ip.removeprefix("::ffff:")
                assert address in ("127.0.0.1", "::1"), (process.name(), connection)


def test_a_stopped_engine_is_told_and_streams_wait(server: Server, expected: str) -> None:
    listener = Listener(server)
    listener.start()
    wait(listener.has_begun, 30, "the stream")
    [engine] = processes_of(server, "engine")
    engine.send_signal(signal.SIGSTOP)
    try:
        told = wait(lambda: not healthy(server.url), 30, "the silence to be noticed")
        asked = time.monotonic()
        assert ask(server) == 503
        assert time.monotonic() - asked < 10, "it does not wait for the engine"
        assert listener.is_alive()
    finally:
        engine.send_signal(signal.SIGCONT)
    print(f"a stopped engine was told after {told:.1f} s")
    wait(lambda: healthy(server.url), 5, "the engine to be back")
    listener.join(60)
    assert listener.text == expected
    assert server.metric("lexshard_engine_restarts_total") == 0


@pytest.mark.parametrize("role", ["api", "ray::HAProxyManager", "ingress"])
def test_a_lost_replica_or_ingress_answers_again(server: Server, expected: str, role: Any) -> None:
    if role.startswith("ray::"):
        if server.backend != "ray":
            pytest.skip("there is none of Ray's")
        victim = process_of(server, role)
    else:
        [victim] = processes_of(server, role)
    listener = Listener(server)
    listener.start()
    wait(listener.has_begun, 30, "the stream")
    victim.kill()
    seconds, slowest = seconds_until_served(server, 60)
    print(f"{role} killed: served again after {seconds:.1f} s, slowest answer {slowest:.2f} s")
    assert seconds < RECOVERY_SECONDS
    assert slowest < 30, "no request is left hanging"
    listener.join(10)
    assert not listener.is_alive()
    whole = listener.broken is None and listener.done  # a busy machine may end it before the kill
    assert not whole or listener.text == expected, "a cut stream looks whole"
    again = Listener(server)
    again.run()
    assert again.text == expected


def test_a_stop_tells_every_open_stream_and_leaves_nothing(server: Server) -> None:
    """The last of this module: the server is gone afterwards."""
    listeners = [Listener(server, tokens=1900) for _ in range(4)]
    for listener in listeners:
        listener.start()
    wait(lambda: all(each.has_begun() for each in listeners), 30, "the streams")
    processes = family(server)
    server.process.send_signal(signal.SIGINT)
    told = time.monotonic()
    wait(lambda: ask(server, 5) == 503, 3, "new requests to be refused")
    for listener in listeners:
        listener.join(20)
        assert listener.broken is None
        assert listener.done
        assert listener.was_told_of_the_end()
    print(f"the last stream ended {time.monotonic() - told:.1f} s after the signal")
    assert server.process.wait(30) == 0
    assert alive(processes) == []


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers have their folders, of this test alone. Paths of sockets must be short."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("name", ["raylet/raylet", "gcs/gcs_server"])
def test_without_ray_the_server_ends_within_ten_seconds_and_leaves_nothing(
    tmp_path: Path, name: str, own_folder: Path
) -> None:
    with running_server(tmp_path, *SLOW_BODY, backend="ray") as running:
        processes = family(running)
        listener = Listener(running)
        listener.start()
        wait(listener.has_begun, 30, "the stream")
        process_of(running, name).kill()
        seconds = wait(lambda: running.process.poll() is not None, 30, "the server to end")
        print(f"{name} killed: ended after {seconds:.1f} s")
        assert seconds < 10
        assert running.process.returncode == 1
        assert alive(processes) == []
        port = int(running.url.rpartition(":")[2])
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=1)
        assert name.rpartition("/")[2] in running.log.read_text()
    left = set(own_folder.glob("lexshard-*"))
    assert left, "killed owners leave their folders"
    with running_server(tmp_path, *SLOW_BODY) as running:
        assert not any(folder.exists() for folder in left)
        listener = Listener(running)  # without a stream the first signal would do
        listener.start()
        wait(listener.has_begun, 30, "the stream")
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        running.process.send_signal(signal.SIGINT)
        seconds = wait(lambda: running.process.poll() is not None, 10, "the second signal")
        assert seconds < 3
        assert running.process.returncode == 130
