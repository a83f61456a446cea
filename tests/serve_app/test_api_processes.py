"""Several API processes before one engine: clients see one server, any of them may die alone."""

from __future__ import annotations

import itertools
import signal
import statistics
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.backends import PROCESS_AND_RAY
from tests.support.faults import SLOW_BODY, Listener, alive, ask, family, processes_of
from tests.support.real_server import Server, running_scripted_server, running_server, wait

pytestmark = pytest.mark.slow

PROCESSES, STREAMS, MOST = 2, 6, 8
ANSWERED = 'lexshard_http_requests_total{method="POST",path="/v1/completions",status="200"}'


@pytest.fixture(
    scope="module",
    params=[(engine, backend) for backend in PROCESS_AND_RAY for engine in ("scripted", "demo")],
    ids="-".join,
)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """With scripted engines, one for each process, and with the real one that all share."""
    folder = tmp_path_factory.mktemp("processes")
    engine, backend = request.param
    options = ("--api-processes", str(PROCESSES), "--max-running-requests", str(MOST))
    options += ("--shutdown-grace-seconds", "1")  # less than a text takes
    options += SLOW_BODY
    with (
        running_scripted_server(folder, backend, api_processes=PROCESSES, max_running_requests=MOST)
        if engine == "scripted"
        else running_server(folder, *options, backend=backend)
    ) as running:
        wait(lambda: "lexshard is ready" in running.log.read_text(), 60, "the banner")
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    """What the seeded stream says when nothing happens."""
    listener = Listener(server)
    listener.run()
    assert listener.done
    return listener.text


def replicas(server: Server) -> list[psutil.Process]:
    return processes_of(server, "api")


def listeners(server: Server, count: int, tokens: int = 1500) -> list[Listener]:
    """They have all begun."""
    made = [Listener(server, tokens) for _ in range(count)]
    for listener in made:
        listener.start()
    wait(lambda: all(each.has_begun() for each in made), 60, "the streams")
    return made


def test_whoever_answers_speaks_for_the_server(server: Server) -> None:
    assert len(replicas(server)) == PROCESSES
    assert f"{PROCESSES} API processes" in server.log.read_text()
    assert [ask(server) for _ in range(10)] == [200] * 10
    wait(lambda: server.metric(ANSWERED) == 10, 10, "the last answer to be counted")
    assert {server.metric(ANSWERED) for _ in range(6)} == {10.0}
    models = [httpx.get(f"{server.url}/v1/models").json() for _ in range(6)]
    assert all(each == models[0] for each in models)


def test_limits_are_the_servers(server: Server) -> None:
    streams = listeners(server, MOST)
    assert {server.metric("lexshard_admitted_sequences") for _ in range(6)} == {float(MOST)}
    assert [ask(server) for _ in range(6)] == [503] * 6
    for stream in streams:
        stream.join(120)
        assert stream.done
    assert ask(server) == 200


def test_a_process_that_dies_takes_only_its_own_streams(server: Server, expected: str) -> None:
    streams = listeners(server, STREAMS)
    before = server.metric(ANSWERED)
    victim = replicas(server)[0]
    victim.kill()
    wait(lambda: not alive([victim]), 5, "the kill")
    died = time.monotonic()
    waited = []
    while time.monotonic() - died < 5:
        asked = time.monotonic()
        assert ask(server) == 200
        waited.append(time.monotonic() - asked)
        assert server.metric(ANSWERED) > before, "nothing that was counted is lost"
    print(f"answers {statistics.median(waited):.2f} s in the median, {max(waited):.2f} s at most")
    # Not by the successor, for which they would have to wait.
    assert statistics.median(waited) < 2, "new requests are answered at once"
    assert max(waited) < 20, "also while the successor starts on the same cores"
    for stream in streams:
        stream.join(120)
    whole = [stream for stream in streams if stream.done]
    assert len(whole) == STREAMS // PROCESSES, "they were spread evenly"
    assert [stream.text for stream in whole] == [expected] * len(whole)
    for stream in whole:
        gaps = [after - before for before, after in itertools.pairwise(stream.times)]
        print(f"longest pause of a stream that went on: {max(gaps):.2f} s")
    assert all(stream.broken is not None for stream in streams if not stream.done)
    wait(lambda: server.metric("lexshard_admitted_sequences") == 0, 5, "its places to be free")
    assert server.metric("lexshard_admitted_waiting_tokens") == 0
    wait(lambda: server.metric("lexshard_running") == 0, 10, "the engine to forget its streams")
    assert server.metric("lexshard_engine_restarts_total") == 0
    seconds = wait(lambda: len(replicas(server)) == PROCESSES, 60, "its successor")
    print(f"a successor after {time.monotonic() - died:.1f} s (waited {seconds:.1f})")


@pytest.mark.parametrize(
    "server", [("demo", backend) for backend in PROCESS_AND_RAY], indirect=True, ids="-".join
)
def test_a_stop_tells_the_streams_of_every_process(server: Server) -> None:
    """The last of this module: the server is gone afterwards."""
    streams = listeners(server, 4, tokens=1900)
    processes = family(server)
    server.process.send_signal(signal.SIGINT)
    for stream in streams:
        stream.join(30)
        assert stream.broken is None
        assert stream.done
        assert stream.was_told_of_the_end()
    assert server.process.wait(30) == 0
    assert alive(processes) == []
