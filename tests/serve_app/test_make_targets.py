"""`make serve` and `make cluster`: the same text from plain processes and from actors behind Ray
Serve, and nothing in either that has no part in it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.support.backends import Backend
from tests.support.faults import family, named, processes_of
from tests.support.paths import ROOT
from tests.support.real_server import Server, running_server

SEEDS = range(8)
COMPUTING = ("/torch/", "/llvmlite/", "/scipy/")  # libraries, by a folder they lie in


def flags_of(target: str) -> list[str]:
    """What ``make`` tells the server, but for its model and address."""
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [line] = [line for line in done.stdout.splitlines() if "lexshard serve" in line]
    words = shlex.split(line.partition("lexshard serve")[2])
    for flag in ("--host", "--port", "--model"):
        at = words.index(flag)
        del words[at : at + 2]
    return words


def started(tmp_path_factory: pytest.TempPathFactory, target: str, backend: Backend) -> Any:
    return running_server(tmp_path_factory.mktemp(target), *flags_of(target), backend=backend)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory, "serve", "process") as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory, "cluster", "ray") as server:
        yield server


def text(server: Server, seed: int) -> str:
    stream = server.client().completions.create(
        model="lexshard-demo",
        prompt=f"Once upon a time there was a little girl who {seed % 3}",
        max_tokens=60,
        seed=seed,
        temperature=0.9,
        top_p=1.0 if seed % 2 else 0.9,
        frequency_penalty=0.1 * (seed % 4),
        stream=True,
        extra_body={"top_k": 40 if seed % 3 else -1},
    )
    return "".join(chunk.choices[0].text for chunk in stream)


def roles(server: Server) -> list[tuple[str, int]]:
    """What there is, with its process."""
    report = httpx.get(f"{server.url}/status").json()
    return [(f"{role['role']} {role['index']}", role["process_id"]) for role in report["roles"]]


def loaded(process: psutil.Process) -> set[str]:
    """Of ``COMPUTING``, what is in the memory of a process."""
    paths = [each.path for each in process.memory_maps()]
    return {name for name in COMPUTING if any(name in path for path in paths)}


def test_both_say_the_same(one: Server, cluster: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda seed: text(one, seed), SEEDS))
        assert list(pool.map(lambda seed: text(cluster, seed), SEEDS)) == said
    assert len(set(said)) == len(SEEDS)


def test_one_engine_decides_alone_and_a_cluster_has_an_actor_for_each_part(
    one: Server, cluster: Server
) -> None:
    assert len({process_id for name, process_id in roles(one) if name != "api 0"}) == 1
    apart = dict(roles(cluster))
    parts = ("api 0", "body 0", "shard 1", "sampler 0", "sampler 1")
    assert len({apart[part] for part in parts}) == len(parts)


@pytest.mark.skipif(
    sys.platform != "linux", reason="tells what a process has loaded on Linux alone"
)
def test_what_computes_is_loaded_where_it_computes_alone(one: Server, cluster: Server) -> None:
    for server in (one, cluster):
        apart = [process_id for name, process_id in roles(server) if not name.startswith("api")]
        apart += [each.pid for each in named(server, "kernels.ahead.worker")]  # of the engine
        others = [each for each in family(server) if each.pid not in apart]
        for process in (psutil.Process(server.process.pid), *others):
            assert loaded(process) == set(), process.cmdline()
        [engine] = processes_of(server, "engine")
        assert "/torch/" in loaded(engine)


def test_ray_is_started_without_what_nobody_asks_there(cluster: Server) -> None:
    """No dashboard, no autoscaler, and no proxy of Serve's beside HAProxy."""
    commands = [" ".join(process.cmdline()) for process in family(cluster)]
    for absent in ("dashboard.py", "monitor.py", "DashboardAgent", "RuntimeEnvAgent", "ProxyActor"):
        found = [each for each in commands if absent in each.replace("log_monitor.py", "")]
        # The node's own command line tells of every file there is.
        assert [each for each in found if "raylet --" not in each] == [], absent
    assert processes_of(cluster, "ingress")


def test_nothing_of_ray_is_in_a_server_of_plain_processes(one: Server) -> None:
    for process in (psutil.Process(one.process.pid), *family(one)):
        assert "ray::" not in " ".join(process.cmdline())
        assert not [each for each in process.memory_maps() if "/ray/_raylet" in each.path]
