"""The same group over `ray.util.collective`, between Ray actors: answers and time-outs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lexshard.cluster.collective.gloo_links import open_store
from tests.support.ray_shard import RayShard
from tests.support.shard_process import FORMING_SECONDS, HOST
from tests.support.sharded_cases import HeadCase

pytestmark = pytest.mark.slow
CASE = HeadCase(2, screens=("int8",), seed=2)
SECONDS = 2.0


@pytest.fixture(scope="module")
def ray_is_running() -> Iterator[Any]:
    from lexshard.cluster.lifecycle import start_local_ray

    start_local_ray()
    import ray

    yield ray
    ray.shutdown()


def gang(ray: Any, port: int, seconds: float) -> list[Any]:
    """An actor for each shard, the root first."""
    actor = ray.remote(RayShard).options(num_cpus=0, max_concurrency=2)
    actors = [actor.remote(CASE, rank, port, seconds) for rank in range(CASE.shards)]
    ray.get([each.join.remote() for each in actors], timeout=120)
    return actors


def test_actors_answer_like_one_process_and_a_stopped_one_is_named_in_time(
    ray_is_running: Any,
) -> None:
    ray = ray_is_running
    store = open_store(HOST, 0, FORMING_SECONDS, root=True)
    root, server = gang(ray, store.port, SECONDS)
    serving = server.serve.remote()
    assert ray.get(root.compare.remote(0), timeout=300)
    os.kill(ray.get(server.process_id.remote()), signal.SIGSTOP)
    started = time.monotonic()
    kind, rank, seconds = ray.get(root.fail.remote(), timeout=60)
    assert (kind, rank) == ("CollectiveTimeoutError", 1)
    assert SECONDS <= seconds < SECONDS + 10
    assert time.monotonic() - started < 30
    for actor in (root, server):
        ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(serving, timeout=60)
