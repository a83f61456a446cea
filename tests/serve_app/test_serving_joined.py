"""`lexshard serve --address`, a guest in a Ray cluster, which it leaves as it was, and `serve run`:
they say what a server of its own says."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from lexshard.cluster.ports import free_port
from tests.support.paths import DEMO, ROOT, SERVE_EXAMPLE
from tests.support.ray_head import command, ray_environment, ray_head
from tests.support.real_server import healthy, running_server, wait

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little girl who"
SERVE = (sys.executable, "-m", "lexshard.serve_app.cli", "serve", "--model", str(DEMO))
FLAGS = ("--head", "dense", "--max-model-len", "128", "--shards", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes that were there before."""
    from lexshard.cluster.lifecycle import prepare_environment

    prepare_environment()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _left_behind() -> list[str]:
    """Actors and placement groups that are alive, and CPUs that are taken."""
    import ray
    from ray._private.state import actors
    from ray.util.placement_group import placement_group_table

    alive = [each["ActorClassName"] for each in actors().values() if each["State"] != "DEAD"]
    groups = [each["state"] for each in placement_group_table().values()]
    free = ray.available_resources().get("CPU", 0.0)
    taken = ray.cluster_resources()["CPU"] - free
    return [
        *alive,
        *(state for state in groups if state != "REMOVED"),
        *([f"{taken:g} CPUs"] if taken else []),
    ]


def _texts(url: str) -> list[str]:
    found = []
    for seed in range(3):
        body = {"prompt": PROMPT, "max_tokens": 60, "seed": seed, "temperature": 0.8}
        body |= {"ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["text"])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a server says with a Ray of its own, where every process has its share."""
    shares = ("--reserve", "--cpus-per-body", "0.5", "--cpus-per-shard", "0.5")
    folder = tmp_path_factory.mktemp("own")
    with running_server(folder, *FLAGS, *shares, backend="ray") as server:
        return _texts(server.url)


def _refused(*flags: str) -> str:
    """What a server that cannot start says last."""
    words = [*SERVE, "--port", str(free_port()), "--device", "cpu", *FLAGS, *flags]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def test_a_guest_says_what_a_host_says_and_leaves_nothing(
    expected: list[str], cluster: Any, tmp_path: Path
) -> None:
    joining = ("--address", cluster.address)
    with running_server(tmp_path, *FLAGS, *joining, backend="ray") as server:
        assert _texts(server.url) == expected
        roles = httpx.get(f"{server.url}/status").json()["roles"]
        nodes = [role["node"] for role in roles if role["role"] == "shard"]
        assert len(set(nodes)) == len(nodes) == 2
        told = _refused("--address", cluster.address)
        assert "another lexshard server runs in this cluster already" in told
    assert server.process.returncode == 0
    assert "does not end" not in server.log.read_text()
    assert "infinite retries" not in server.log.read_text()
    wait(lambda: _left_behind() == [], 20, f"an empty cluster, not {_left_behind()}")


def test_what_finds_no_room_is_told(cluster: Any) -> None:
    import ray

    told = _refused("--address", cluster.address, "--shards", "4", "--placement-seconds", "1")
    assert told.startswith("lexshard: cannot place shard 2: it needs 1 CPU")
    assert "free are 1 CPU" in told
    assert f"on {ray.nodes()[0]['NodeManagerAddress']} (" in told
    assert _left_behind() == []


def test_a_stop_before_it_is_ready_leaves_nothing(cluster: Any, tmp_path: Path) -> None:
    words = [*SERVE, *FLAGS, "--port", str(free_port()), "--device", "cpu"]
    words += ["--address", cluster.address]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output)
    try:
        wait(lambda: "waiting for the engine" in log.read_text(), 120, "the application")
        assert _left_behind() != []
    finally:
        process.terminate()
    assert process.wait(30) == 0, log.read_text()
    wait(lambda: _left_behind() == [], 20, f"an empty cluster, not {_left_behind()}")


def test_a_guest_leaves_soon_that_has_lost_a_node(cluster: Any, tmp_path: Path) -> None:
    import ray

    third = cluster.add_node(num_cpus=1)
    joining = ("--address", cluster.address, "--shards", "3")
    with running_server(tmp_path, *FLAGS, *joining, backend="ray") as server:
        wait(lambda: "lexshard is ready" in server.log.read_text(), 60, "the banner")
        cluster.remove_node(third, allow_graceful=False)
        wait(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 120, "the loss")
        began = time.monotonic()
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < 10
    told = server.log.read_text()
    assert "does not end" not in told
    assert "infinite retries" not in told
    wait(lambda: _left_behind() == [], 20, f"an empty cluster, not {_left_behind()}")


def test_what_others_serve_is_not_touched(cluster: Any) -> None:
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Greeting:
        def __call__(self) -> str:
            return "hello"

    serve.start(http_options={"port": free_port()})
    try:
        handle: Any = serve.run(Greeting.bind(), name="greeting", route_prefix="/greeting")
        told = _refused("--address", cluster.address)
        assert "Ray Serve runs in this cluster already (applications: greeting)" in told
        assert "lexshard.serve_app.build:app" in told
        assert handle.remote().result() == "hello"
    finally:
        serve.shutdown()


def test_no_cluster_at_the_address_is_told() -> None:
    told = _refused("--address", f"127.0.0.1:{free_port()}")
    assert "no Ray cluster" in told
    assert "ray start --head" in told


def test_a_cluster_that_asks_for_no_token_is_warned_of(tmp_path: Path) -> None:
    guarded = ray_environment()
    is_open = {key: value for key, value in guarded.items() if key != "RAY_AUTH_TOKEN"}
    is_open |= {"RAY_AUTH_MODE": "disabled"}
    for environment, warned in ((is_open, True), (guarded, False)):
        with ray_head(tmp_path, environment) as address:
            words = [*SERVE, "--port", str(free_port()), "--shards", "9", "--placement-seconds"]
            ended = subprocess.run(
                [*words, "0", "--address", address],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert "cannot place" in ended.stderr
        warning = f"WARNING: the Ray cluster at {address} asks for no token"
        assert (warning in ended.stdout) is warned, ended.stdout


@contextmanager
def served_by_serve_run(folder: Path, port: int) -> Iterator[str]:
    """The example, with this model and port."""
    data = yaml.safe_load(SERVE_EXAMPLE.read_text(encoding="utf-8"))
    data["http_options"]["port"] = port
    changes = {"model": str(DEMO), "head": "dense", "max_model_len": 128}
    data["applications"][0]["args"] |= changes
    path, log = folder / "serve.yaml", folder / "log"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command("serve"), "run", str(path), "--address", "local"],
            cwd=ROOT,
            env=ray_environment(),
            stdout=output,
            stderr=output,
            # Ray's command has no handler of its own, and what a shell runs in the background
            # ignores the signal that ends it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: healthy(url) or process.poll() is not None, 300, "serve run")
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            print(log.read_text()[-3000:])
            process.kill()


def test_serve_run_says_what_lexshard_serve_says(expected: list[str], tmp_path: Path) -> None:
    with served_by_serve_run(tmp_path, free_port()) as url:
        assert _texts(url) == expected
