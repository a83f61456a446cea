"""`lexshard serve --replicas`: several engines behind one address. Ray, Serve and HAProxy are real,
the engines scripted."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.ports import free_port
from tests.support.mock_server import model_folder
from tests.support.paths import ROOT
from tests.support.real_server import Server, running_scripted_server, wait

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("replicas")
    with running_scripted_server(folder, "ray", replicas=2, routing="prefix") as running:
        wait(lambda: "lexshard is ready" in running.log.read_text(), 60, "both replicas")
        yield running


def completed(server: Server) -> Counter[str]:
    """How many completions each replica has answered."""
    found: Counter[str] = Counter()
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counts = sample.name == "lexshard_http_requests_total"
            own = counts and sample.labels["path"] == "/v1/completions"
            found[sample.labels["replica"]] += int(sample.value) if own else 0
    return found


def processes_of(server: Server, deployment: str) -> list[psutil.Process]:
    every = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in every if f"ServeReplica:lexshard:{deployment}" in each.name()]


def test_a_response_is_found_whichever_replica_is_asked(server: Server) -> None:
    """Also where the replica that made it has died; of a store that has, nothing is found."""

    def ask(number: int, **fields: Any) -> httpx.Response:
        body = {"input": f"{number} mice", "max_output_tokens": 16, **fields}
        return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)

    def kept(name: str) -> int:
        return httpx.get(f"{server.url}/v1/responses/{name}", timeout=60).status_code

    made = [ask(0).json()["id"]]
    for number in range(1, 12):  # which go by their beginning to either
        followed = ask(number, previous_response_id=made[-1])
        assert followed.status_code == 200, followed.text
        made.append(followed.json()["id"])
        assert kept(made[0]) == 200
    assert httpx.delete(f"{server.url}/v1/responses/{made[0]}", timeout=60).status_code == 200
    refused = ask(99, previous_response_id=made[-1])
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    [store] = processes_of(server, "responses")
    store.kill()
    wait(lambda: kept(made[-1]) == 404, 60, "the store's successor")
    wait(lambda: kept(ask(0).json()["id"]) == 200, 60, "the store's successor")


def complete(server: Server, prompt: str, tokens: int = 2) -> None:
    body = {"prompt": prompt, "max_tokens": tokens}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text


def test_what_begins_alike_has_one_replica_and_all_are_told_of(server: Server) -> None:
    before = completed(server)
    assert len(before) == 2
    for _ in range(6):
        time.sleep(1.0)  # what was asked before is still counted for a moment after its answer
        complete(server, "Once upon a time")
    added = completed(server)
    added.subtract(before)
    assert sorted(added.values()) == [0, 6]
    for number in range(20):
        complete(server, f"{number} little pigs")
    added = completed(server)
    added.subtract(before)
    assert sum(added.values()) == 26
    assert min(added.values()) > 0


def test_a_replica_that_dies_takes_its_own_streams_and_another_comes(server: Server) -> None:
    """Everybody else is answered meanwhile."""
    replicas = processes_of(server, "server")
    assert len(replicas) == 2

    def stream(number: int, begun: threading.Event) -> str:
        body = {"prompt": f"{number} cats", "max_tokens": 600, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            assert reply.status_code == 200
            lines: list[str] = []
            try:
                for line in reply.iter_lines():
                    lines.append(line)
                    if len(lines) == 4:
                        begun.set()
            except httpx.HTTPError:
                return "broken"
            return "whole" if "data: [DONE]" in lines else "cut short"

    events = [threading.Event() for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(stream, number, event) for number, event in enumerate(events)]
        for event in events:
            assert event.wait(60)
        replicas[0].kill()
        for number in range(40):
            complete(server, f"{number} dogs")
        ends = Counter(each.result(120) for each in streams)
    assert set(ends) == {"whole", "broken"}, ends
    wait(lambda: len(completed(server)) == 2, 60, "the replica's successor")
    for number in range(10):
        complete(server, f"{number} birds")


def test_replicas_come_with_requests_and_go_without_one_that_fails(tmp_path: Path) -> None:
    options = {"replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2}
    failures: list[str] = []
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            try:
                complete(server, f"{number} cats", 200)
            except (AssertionError, httpx.HTTPError) as error:
                failures.append(repr(error))

    with (
        running_scripted_server(tmp_path, "ray", **options) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        for number in range(8):
            pool.submit(ask, number)
        wait(lambda: len(completed(server)) == 3, 120, "three replicas")
        stop.set()
    assert failures == []


@contextmanager
def updated_server(folder: Path) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Its address, its model, and the process of `tests.support.rolling`."""
    port = free_port()
    config = ServeConfig(model=str(model_folder(folder)), port=port, replicas=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rolling"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deploy(process, json.loads(config.model_dump_json(by_alias=True)))
        yield f"http://127.0.0.1:{port}", config.model, process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def deploy(process: subprocess.Popen[str], options: dict[str, Any]) -> None:
    """Returns when ``options`` hold."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(options) + "\n")
    process.stdin.flush()
    assert any("deployed" in line for line in process.stdout), "it has ended"


def test_an_update_and_a_scaling_down_cut_nobody_off(tmp_path: Path) -> None:
    """Streams of two seconds, eight at any time, while all replicas are replaced twice, one goes
    and another comes."""
    ends: Counter[str] = Counter()
    stop = threading.Event()

    def ask(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            body = {"prompt": f"{number} cats, {turn}", "max_tokens": 400, "stream": True}
            try:
                with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                    lines = list(reply.iter_lines())
                whole = "data: [DONE]" in lines and said(lines) == "x" * 400
                ends["whole" if whole else f"{reply.status_code}: {lines[-3:]}"] += 1
            except httpx.HTTPError as error:
                ends[repr(error)] += 1

    with updated_server(tmp_path) as (url, model, process), ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(ask, number)
        counts: list[Counter[str]] = []
        for limit, replicas in ((1000, 2), (1001, 2), (1001, 1), (1001, 2)):
            args = {"model": model, "max_waiting_tokens": limit}
            deploy(process, {"args": args, "num_replicas": replicas})
            time.sleep(4)
            counts.append(ends.copy())
        stop.set()
    assert ends.keys() == {"whole"}, counts
    assert ends["whole"] > 64


def said(lines: list[str]) -> str:
    told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(each["choices"][0]["text"] for each in told if each["choices"])
