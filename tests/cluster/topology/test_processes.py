"""Which roles share a process, and what a placement group is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.cluster import lifecycle
from lexshard.cluster.apart import answer_apart
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import PROCESSOR
from lexshard.cluster.joining import Node, Versions, mismatch, two_orders
from lexshard.cluster.topology import reservation
from lexshard.cluster.topology.assignment import AssignmentError
from lexshard.cluster.topology.configured import RoleResources, configured_processes, processes_on
from lexshard.cluster.topology.nodes import NodeResources
from lexshard.cluster.topology.placement import PlacementError, place
from lexshard.cluster.topology.processes import Processes, Role
from lexshard.cluster.topology.reservation import bundles_of, reserve
from tests.support.paths import DEMO, DEMO_DRAFT

GIB = 2**30
NODE = NodeResources("a", 8, 16 * GIB)


def processes(resources: RoleResources | None = None, **changes: Any) -> Processes:
    configuration = EngineConfiguration(str(DEMO), **changes)
    return configured_processes(configuration, resources or RoleResources(), NODE)


def test_an_engine_alone_asks_for_what_the_largest_of_its_roles_asks_for() -> None:
    """Body, drafter and head compute in turn; their memories add up."""
    alone = processes(RoleResources(body_cpus=2.0))
    assert alone.all == (alone.engine,)
    assert (alone.engine.cpus, alone.engine.gpus) == (2.0, 0.0)
    drafting = processes(RoleResources(drafter_cpus=0.5), draft=str(DEMO_DRAFT))
    assert drafting.engine.cpus == 1.0
    assert drafting.engine.bytes > alone.engine.bytes
    assert processes(RoleResources(body_gpus=0.5, shard_gpus=0.25)).engine.gpus == 0.5


def test_samplers_are_beside_the_engine_unless_they_are_actors() -> None:
    assert processes(samplers=2).engine.cpus == 3.0
    actors = processes(samplers=2, sampler_placement="ray")
    assert actors.engine.cpus == 1.0
    assert [role.name for role in actors.samplers] == ["sampler 0", "sampler 1"]


def test_shards_but_the_first_and_spares_are_processes_of_their_own() -> None:
    gang = processes(shards=3, shard_spares=1, samplers=1, sampler_placement="ray")
    assert [role.name for role in gang.all] == [
        "the engine",
        "shard 1",
        "shard 2",
        "spare shard 0",
        "sampler 0",
    ]
    assert processes(shard_spares=1).spares == ()


def test_each_rank_has_a_gpu_of_its_own_and_its_part_of_the_body() -> None:
    on_gpus = RoleResources(body_gpus=1.0, shard_gpus=1.0)
    alone, shared = (processes(on_gpus, tensor_parallel=ranks) for ranks in (None, 4))
    assert [(role.kind, role.gpus) for role in shared.ranks] == [("rank", 1.0)] * 3
    assert sum(role.bytes for role in shared.ranks) < alone.engine.bytes
    shares = RoleResources(body_gpus=0.6, shard_gpus=0.4)
    beside = processes(shares, tensor_parallel=4, shards=4, shard_spares=1)
    node = NodeResources("a", 16, 64 * GIB, gpus=4, gpu_memory=80 * GIB)
    placed = place(beside.all, [node]).placed
    for kind in ("rank", "shard"):
        assert len({each.gpu for each in placed if each.role.kind == kind}) == 3
    with pytest.raises(ValueError, match="no two ranks"):
        processes(RoleResources(body_gpus=0.5), tensor_parallel=2)


def test_a_rank_has_its_shard_and_what_the_larger_of_both_asks_for() -> None:
    resources = RoleResources(body_cpus=1.0, shard_cpus=2.0)
    apart, together = (
        processes(resources, tensor_parallel=2, shards=2, shard_spares=spares) for spares in (1, 0)
    )
    assert [role.name for role in together.all] == ["the engine", "rank 1"]
    assert [role.cpus for role in together.all] == [2.0, 2.0]
    assert together.ranks[0].bytes == apart.ranks[0].bytes + apart.shards[0].bytes


def test_the_engine_goes_first_and_what_finds_no_room_is_named() -> None:
    two = [NodeResources("a", 1, 16 * GIB), NodeResources("b", 1, 16 * GIB)]
    gang = processes(shards=2)
    assert [each.node for each in place(gang.all, two).placed] == [0, 1]
    with pytest.raises(PlacementError, match=r"cannot place shard 2: it needs 1 CPU, .*--shards"):
        place(processes(shards=3).all, two)


def test_an_engine_is_told_what_its_own_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much others have, as where the head is one without work."""
    nodes = [NodeResources("head", 0, 16 * GIB), NodeResources("worker", 48, 64 * GIB)]
    monkeypatch.setattr(reservation, "cluster_nodes", lambda first: (["h", "w"], nodes))
    told = "it needs 1 CPU, and this machine has 0 left, .*`ray start --num-cpus`.*`serve deploy`"
    with pytest.raises(PlacementError, match=told):
        reserve(processes(), home="h", seconds=0.0)


def test_a_spare_is_not_lost_with_the_shard_it_is_for() -> None:
    nodes = [NodeResources(name, 2, 16 * GIB) for name in "abc"]
    gang = processes(shards=3, shard_spares=1)
    assert [each.node for each in place(gang.all, nodes).placed] == [0, 0, 1, 2]
    assert [each.node for each in place(gang.all, nodes[:2]).placed] == [0, 0, 1, 1]


def test_rays_store_has_room_for_the_head_of_every_replica_as_far_as_shared_memory_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where that is less, it is said."""
    assert lifecycle.head_bytes(str(DEMO), 3) == 3 * 16_384 * 256 * 2
    assert lifecycle.head_bytes("/absent", 3) == 0
    monkeypatch.setattr(lifecycle, "SHARED_MEMORY", Path("/"))
    own = lifecycle.OBJECT_STORE_BYTES
    for room, heads, size in ((8, 4 * GIB, own + 4 * GIB), (0, 0, own), (1, 4 * GIB, GIB)):
        assert caplog.text == ""
        monkeypatch.setattr(lifecycle, "disk_usage", lambda _, room=room: Mock(free=room * GIB))
        assert lifecycle.store_bytes(heads) == size
    assert "/dev/shm has room for 1.0 of 4.1 GiB" in caplog.text


def test_of_several_gpus_a_bundle_has_whole_ones() -> None:
    node = NodeResources("a", 8, 16 * GIB, gpus=2, gpu_memory=GIB)

    def asked(*shares: float) -> float:
        roles = [Role("shard", f"{n}", 1.0, share, ()) for n, share in enumerate(shares)]
        [bundle] = bundles_of(place(roles, [node]))
        return bundle["GPU"]

    assert asked(0.25, 0.5) == 0.75
    assert asked(0.5, 0.75) == 2.0


def test_a_node_of_other_versions_is_named_with_both() -> None:
    own = Versions("1.0", "2.60.0", "3.11.4")
    assert mismatch(own, {"10.0.0.1": own}) is None
    told = mismatch(own, {"10.0.0.1": own, "10.0.0.2": own._replace(lexshard="0.9")})
    assert told == "node 10.0.0.2 has lexshard 0.9, this one 1.0: install the same on all nodes"
    missing = mismatch(own, {"10.0.0.2": own._replace(lexshard=None)})
    assert missing is not None
    assert missing.startswith("node 10.0.0.2 has no lexshard, this one 1.0")


def test_nodes_that_would_draw_other_tokens_are_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.delenv(PROCESSOR, raising=False)
    own = Versions("1.0", "2.60.0", "3.11.4")
    nodes = {"10.0.0.1": Node(own, False), "10.0.0.2": Node(own, True), "10.0.0.3": Node(own, None)}
    for left_out in ("10.0.0.1", "10.0.0.2"):
        alike = {name: node for name, node in nodes.items() if name != left_out}
        assert two_orders(alike, "cpu") is None
    told = two_orders(nodes, "cpu")
    assert told is not None
    assert "on node 10.0.0.2, which has AMX, than on 10.0.0.1, which has none" in told
    assert "set the variable LEXSHARD_CPU to vectors" in told
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    assert two_orders(nodes, "auto") == told
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    assert two_orders(nodes, "auto") is two_orders(nodes, "cuda") is None
    monkeypatch.setenv(PROCESSOR, "vectors")
    assert two_orders(nodes, "cpu") is None


@pytest.mark.slow
def test_a_process_that_ends_with_its_answer_answers_the_same_and_says_what_is_wrong() -> None:
    config = ServeConfig(model=str(DEMO), shards=2, samplers=1)
    module = "lexshard.cluster.topology.configured"
    assert answer_apart(module, "processes_on", config, [NODE]) == processes_on(config, [NODE])
    too_many = config.model_copy(update={"shards": 9999})
    with pytest.raises(AssignmentError, match="give --shards"):
        answer_apart(module, "processes_on", too_many, [NODE])
