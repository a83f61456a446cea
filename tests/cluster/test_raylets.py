"""A gang on several Ray nodes: one text, whichever node a role is on, and whichever is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import Completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from lexshard.actors.role import RunningRole
from tests.support.nodes_apart import nodes_apart, why_not
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.rank_digests import through_losses
from tests.support.real_server import wait
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close

pytestmark = pytest.mark.slow

NODES = 3
# A node that ends is noticed by Ray at once or within seconds; of one that cannot be reached it
# hears nothing at all, and waits for 65 s if it is not told otherwise.
RAY_NOTICES = {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}


@contextmanager
def raylets(*cpus: int) -> Iterator[Any]:
    """A cluster of nodes with so many CPUs, this process a driver on the first."""
    from lexshard.cluster.lifecycle import prepare_environment

    prepare_environment({})
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for count in cpus:
            cluster.add_node(num_cpus=count)
        ray.init(address=cluster.address, log_to_driver=True)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 32)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    return run_and_close(drafting_engine(), requests)


def configuration_of(**changes: Any) -> EngineConfiguration:
    settings = {
        "max_model_len": 128,
        "draft_length": "fixed",
        "shard_seconds": 60,
        "sampler_placement": "ray",
        "head": "dense",  # the others time their screens in every process
        **changes,
    }
    return EngineConfiguration(str(DEMO), dtype="float32", device="cpu", threads=1, **settings)


@contextmanager
def reserved_engine(**changes: Any) -> Iterator[Engine]:
    """An engine in this process, its shards, samplers and ranks where a reservation says."""
    from lexshard.cluster.ranks.actors import RayRanks
    from lexshard.cluster.roles.actor import own_node
    from lexshard.cluster.samplers.start import SamplerStarter
    from lexshard.cluster.shards.gang import RayShards
    from lexshard.cluster.topology.configured import RoleResources, configured_processes
    from lexshard.cluster.topology.reservation import cluster_nodes, reserve

    configuration = configuration_of(**changes)
    home = own_node()
    processes = configured_processes(configuration, RoleResources(), cluster_nodes(home)[1][0])
    reservation = reserve(processes, home=home, seconds=5)
    try:
        engine = Engine(
            configuration,
            SamplerStarter(reservation),
            shard_starter=RayShards(configuration, reservation),
            start_ranks=RayRanks(float(configuration.shard_seconds), reservation),
        )
        try:
            yield engine
        finally:
            engine.close()
    finally:
        reservation.release()


def _nodes_of(engine: Engine, name: str) -> set[str]:
    roles: list[RunningRole] = engine.roles()
    return {role.place.node for role in roles if role.name == name and role.place.node}


def _address_of(node: str) -> str:
    import ray

    return next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)


def test_shards_and_samplers_on_other_nodes_say_what_one_process_says(
    plain: list[Completion], requests: list[Request]
) -> None:
    with raylets(1, 2, 2):
        from lexshard.cluster.roles.actor import own_node

        with reserved_engine(shards=3, samplers=2, draft=str(DEMO_DRAFT)) as engine:
            shards, samplers = _nodes_of(engine, "shard"), _nodes_of(engine, "sampler")
            assert len({own_node(), *shards, *samplers}) == NODES
            found = run_and_close(engine, requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]


def test_ranks_on_other_nodes_say_what_one_rank_says_also_when_a_node_is_lost(
    requests: list[Request],
) -> None:
    """They add up over sockets: two on one node, one on another, and the engine's."""
    one = run_and_close(Engine(configuration_of(tensor_parallel=1)), requests)
    with raylets(1, 2, 2, 2) as cluster, reserved_engine(tensor_parallel=4) as engine:
        assert len(_nodes_of(engine, "body")) == NODES - 1
        before = engine.roles()[3].place
        lost = next(node for node in cluster.worker_nodes if node.node_id == before.node)

        def lose() -> None:
            lost.kill_raylet()
            os.kill(before.process_id, signal.SIGKILL)  # which would live on for a while

        tokens, seconds = through_losses(engine, requests, lose, (6,))
        print(f"{seconds:.1f} s for the lost node of a rank")
        assert before.node not in _nodes_of(engine, "body")
    assert tokens == [each.token_ids for each in one]


@pytest.mark.parametrize("spares", [0, 1])
def test_a_lost_node_is_replaced_in_the_midst_of_a_step(
    plain: list[Completion], requests: list[Request], spares: int
) -> None:
    """All that ran there, a shard and a sampler, goes to a node that is left."""
    with (
        raylets(1, 2, 2 + spares) as cluster,
        reserved_engine(shards=2, samplers=1, shard_spares=spares) as engine,
    ):
        [before] = _nodes_of(engine, "shard")
        lost = next(node for node in cluster.worker_nodes if node.node_id == before)
        tokens, seconds = through_losses(engine, requests, lost.kill_raylet, (6,))
        print(f"{spares} spares: {seconds:.1f} s for a lost node")
        [after] = _nodes_of(engine, "shard")
        assert after not in ("", before)
    assert tokens == [each.token_ids for each in plain]


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_that_cannot_be_reached_is_replaced_and_harms_nobody_when_it_can_be_again(
    plain: list[Completion],
    requests: list[Request],
    spares: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its processes live and know nothing of it; Ray is told to notice within some seconds."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    for name, value in RAY_NOTICES.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", value)
    with (
        nodes_apart(1, 2, 2 + spares) as nodes,
        reserved_engine(shards=2, samplers=1, shard_spares=spares, shard_seconds=10) as engine,
    ):
        [before] = _nodes_of(engine, "shard")
        lost = next(node for node in nodes if node.address == _address_of(before))
        tokens, seconds = through_losses(engine, requests, lost.cut, (6,))
        print(f"{spares} spares: {seconds:.1f} s for a node that cannot be reached")
        [after] = _nodes_of(engine, "shard")
        assert after not in ("", before)
        lost.mend()
        wait(lambda: not lost.processes(), 60, "what was cut off to end")
        again, _ = through_losses(engine, requests, lambda: None)
    assert tokens == again == [each.token_ids for each in plain]
