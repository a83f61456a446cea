"""A process of a server without Ray that ends: another one at once, unless it does so again; of an
engine that was never ready, a few."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.ports import free_port
from lexshard.cluster.roles.process import KeptProcesses, ProcessRole
from lexshard.serve_app.api_processes.messages import Said
from lexshard.serve_app.start import embedded, server_process
from lexshard.serve_app.start.embedded import (
    API,
    ENGINE,
    INGRESS,
    PAUSE_SECONDS,
    STARTS,
    Due,
    EmbeddedServer,
    Ended,
    Event,
    ServerModules,
    StopAsked,
)
from lexshard.serve_app.start.readiness import StartupError
from tests.support.faults import processes_of
from tests.support.mock_engine import MockEngine
from tests.support.paths import DEMO, ROOT
from tests.support.real_server import Server, healthy, wait

UNREAD = Mock(write=Mock(side_effect=BrokenPipeError))  # standard output whose reader has gone


class Kept:
    """Notes what is started, and what happens then."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.let_go_of: list[str] = []
        self.then: Callable[[], None] = lambda: None

    def start(self, role: ProcessRole) -> None:
        self.started.append(role.name)
        self.then()

    def let_go(self, name: str) -> None:
        self.let_go_of.append(name)

    def process_ids(self) -> set[int]:
        return set()


def server_of(monkeypatch: pytest.MonkeyPatch, *events: Event) -> EmbeddedServer:
    """One that is never waited for, to which so much has happened."""
    monkeypatch.setattr(embedded, "reap_orphans", lambda known: None)
    server = EmbeddedServer(ServeConfig(model="m", api_processes=2), ServerModules())
    monkeypatch.setattr(server, "_later", lambda seconds, event: server._events.put(event))
    server._roles[ENGINE] = ProcessRole(ENGINE, ("engine",))
    for event in events:
        server._events.put(event)
    return server


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-9, "was killed by signal 9 (Killed: out of memory?)"),
        (-4, "was killed by signal 4 (Illegal instruction)"),
        (1, "ended with code 1"),
    ],
)
def test_an_engine_that_ends_before_it_was_ever_ready_is_given_up_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, told: str
) -> None:
    server, kept = server_of(monkeypatch, Ended(ENGINE, code)), Kept()
    kept.then = lambda: server._events.put(Ended(ENGINE, code))
    assert server._keep(cast(Any, kept)) == 1
    assert kept.started == [ENGINE] * (STARTS - 1)
    said = capsys.readouterr()
    assert f"the engine {told} before it was ready; starting it again" in said.out
    assert (
        said.err == f"lexshard: the engine {told} before it was ready, 3 times: it cannot start\n"
    )


def test_an_engine_that_was_ready_once_is_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Said(information=asdict(MockEngine().information))
    before, after = [Ended(ENGINE, -9)], [Ended(ENGINE, -9)] * STARTS
    server = server_of(monkeypatch, *before, (f"{API} 0", ready), *after, StopAsked())
    assert server._keep(cast(Any, Kept())) == 0


def test_an_api_process_that_met_a_failed_start_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It supervises nothing any more. When it ends, it ends the engine that waits to tell why."""
    ready, failed = Said(information=asdict(MockEngine().information)), Said(failure="no memory")
    names = [f"{API} {index}" for index in range(2)]
    server, kept = server_of(monkeypatch, *((name, ready) for name in names)), Kept()
    for event in ((names[1], failed), StopAsked()):
        server._events.put(event)
    assert server._keep(cast(Any, kept)) == 0
    assert kept.let_go_of == [names[1]]


def test_a_stop_waits_for_open_streams_though_a_start_of_the_engine_was_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{API} 0"
    server = server_of(monkeypatch, Due(ENGINE), Ended(name, 0))
    server._announced, server._running = True, {name}
    assert server._stop(cast(Any, Kept())) == 0
    assert not server._running


def test_a_process_that_cannot_be_started_at_the_moment_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, kept = server_of(monkeypatch, Ended(ENGINE, -9), StopAsked()), Kept()

    def then() -> None:
        if len(kept.started) == 1:
            raise BlockingIOError("no room for a process")

    monkeypatch.setattr(sys, "stdout", UNREAD)  # nor is there a reader of that
    kept.then, server._ready = then, {API}
    server._keep(cast(Any, kept))
    assert server._events.get() == Due(ENGINE)
    assert ENGINE not in server._running


def test_nor_does_the_server_need_a_thread_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for a process there is none for a thread."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(embedded, "PAUSE_SECONDS", 0.1)
    server = EmbeddedServer(ServeConfig(model="m"), ServerModules())
    server._roles[ENGINE] = ProcessRole(ENGINE, (sys.executable, "-c", "pass"))
    kept = KeptProcesses(lambda *_: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    server._start_anew(kept, ENGINE)
    assert kept.process_ids() == set()
    assert server._next() == Due(ENGINE)


def test_a_first_death_is_answered_at_once_and_one_that_follows_it_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    later: list[tuple[float, Any]] = []
    monkeypatch.setattr(embedded, "reap_orphans", lambda known: None)
    monkeypatch.setattr(embedded.time, "monotonic", lambda: now[0])
    server = EmbeddedServer(ServeConfig(model="m"), ServerModules())
    monkeypatch.setattr(server, "_later", lambda seconds, event: later.append((seconds, event)))
    server._roles[ENGINE] = ProcessRole(ENGINE, ("engine",))
    kept: Any = Kept()

    server._start_again(kept, ENGINE)
    assert kept.started == [ENGINE]
    now[0] += 1.0
    server._start_again(kept, ENGINE)
    assert kept.started == [ENGINE]
    assert later == [(PAUSE_SECONDS, Due(ENGINE))]
    now[0] += PAUSE_SECONDS
    server._start_again(kept, ENGINE)
    assert kept.started == [ENGINE, ENGINE]


def test_a_port_that_another_server_has_taken_meanwhile_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = server_of(monkeypatch, Ended(INGRESS, 1))
        server._config = ServeConfig(model="m", port=taken.getsockname()[1])
        with pytest.raises(StartupError, match="Address already in use; choose another --port"):
            server._keep(cast(Any, Kept()))


def test_what_processes_print_is_taken_though_nothing_reads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would fail, or wait for ever once their pipe is full."""
    monkeypatch.setattr(sys, "stdout", UNREAD)
    lines = io.BytesIO(20_000 * b"a line\n")  # more than a pipe holds
    with ExitStack() as ends:
        embedded._json_lines(ends).write(lines.getvalue())
    server_process._pass_on(lines)
    assert not lines.read()


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_engine_is_replaced_though_nothing_reads_its_servers_output(log_format: str) -> None:
    """As of a script that waits for the banner and ends."""
    port = free_port()
    options = f"--port {port} --threads 1 --device cpu --log-format {log_format}"
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "serve", str(DEMO), *options.split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        server = Server(f"http://127.0.0.1:{port}", Path(), process, "process")
        try:
            assert process.stdout is not None
            assert any(b"lexshard is ready" in line for line in process.stdout)
            process.stdout.close()
            processes_of(server, "engine")[0].kill()
            wait(lambda: not healthy(server.url), 10, "the loss to be noticed")
            wait(lambda: healthy(server.url), 60, "the next engine")
        finally:
            process.terminate()
