"""`lexshard serve --address`: a guest in a Ray cluster, which it leaves as it was."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lexshard.cluster.ports import free_port
from tests.support.paths import DEMO, ROOT
from tests.support.ray_head import ray_environment, ray_head
from tests.support.real_server import Server, running_server, wait

pytestmark = pytest.mark.slow

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


def _tell(server: Server, seed: int) -> str:
    reply = server.client().completions.create(
        model="lexshard-demo",
        prompt="Once upon a time there was a little girl who",
        max_tokens=60,
        seed=seed,
        temperature=0.8,
        extra_body={"ignore_eos": True},
    )
    return str(reply.choices[0].text)


def _refused(*flags: str) -> str:
    """What a server that cannot start says last."""
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "serve", "--model", str(DEMO)]
    command += ["--port", str(free_port()), "--device", "cpu", *FLAGS, *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stderr.strip().splitlines()[-1]


def test_a_guest_says_what_a_host_says_and_leaves_nothing(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    shares = ("--reserve", "--cpus-per-body", "0.5", "--cpus-per-shard", "0.5")
    with running_server(tmp_path / "own", *FLAGS, *shares, backend="ray") as server:
        expected = [_tell(server, seed) for seed in range(3)]
    (tmp_path / "guest").mkdir()
    joining = ("--address", cluster.address)
    with running_server(tmp_path / "guest", *FLAGS, *joining, backend="ray") as server:
        assert [_tell(server, seed) for seed in range(3)] == expected
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
    command = [
        sys.executable,
        "-m",
        "lexshard.serve_app.cli",
        "serve",
        "--model",
        str(DEMO),
        *FLAGS,
    ]
    command += ["--port", str(free_port()), "--device", "cpu", "--address", cluster.address]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
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
            command = [
                sys.executable,
                "-m",
                "lexshard.serve_app.cli",
                "serve",
                "--model",
                str(DEMO),
            ]
            command += ["--port", str(free_port()), "--shards", "9", "--placement-seconds", "0"]
            ended = subprocess.run(
                [*command, "--address", address],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert "cannot place" in ended.stderr
        warning = f"WARNING: the Ray cluster at {address} asks for no token"
        assert (warning in ended.stdout) is warned, ended.stdout
