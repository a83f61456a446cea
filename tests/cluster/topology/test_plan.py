"""A plan adds up: bytes as the parts of a gang really take them, roles where there is room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.configuration import EngineConfiguration, TierName
from lexshard.actors.index.tightness import arrays_of
from lexshard.cluster.topology.assignment import assign
from lexshard.cluster.topology.configured import RoleResources
from lexshard.cluster.topology.nodes import USABLE_SHARE, NodeResources, NodesError, parse_nodes
from lexshard.cluster.topology.placement import PlacementError, place
from lexshard.cluster.topology.plan import TopologyPlan, describe, plan_topology
from lexshard.cluster.topology.processes import Role
from lexshard.cluster.topology.sizes import (
    ModelSizes,
    body_memory,
    kv_blocks,
    read_model_sizes,
    tier_row_bytes,
)
from lexshard.kernels.quantize import quantize
from tests.support.large_sizes import LLAMA
from tests.support.paths import DEMO
from tests.support.tiny_models import save_tiny

GIB = 2**30
GPUS = NodeResources("a", 16, 256 * GIB, 4, 80 * GIB)


def configuration(**changes: Any) -> EngineConfiguration:
    return EngineConfiguration(model="m", **changes)


# -- sizes and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi"])
def test_sizes_are_those_of_the_loaded_model(
    family: str, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path)
    sizes = read_model_sizes(folder, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert sizes.parameters == sum(each.numel() for each in model.parameters())
    assert sizes.output_parameters == (0 if head is embedding else head.numel())
    assert (sizes.vocabulary_size, sizes.hidden_size) == tuple(head.shape)
    body = GeneralBody(model, pack_linears=False)
    if dtype == "bfloat16":
        body.round_products()
    assert sizes.kv_block_bytes(on_gpu=False) == body.kv_bytes_per_block()


def test_a_model_that_could_not_be_served_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        read_model_sizes(save_tiny("mamba", tmp_path))


@pytest.mark.parametrize("tier", get_args(TierName))
@pytest.mark.parametrize("columns", [96, 256])
def test_a_tier_takes_what_its_arrays_take(tier: TierName, columns: int) -> None:
    """Per row; what does not grow with rows (coins, rotations, directions) is left out."""
    generator = np.random.default_rng(0)
    direction = generator.standard_normal(columns).astype(np.float32)

    def stored(rows: int) -> int:
        weight = generator.standard_normal((rows, columns)).astype(np.float32)
        made = quantize(torch.from_numpy(weight), tier, direction=direction)
        return sum(array.nbytes for _, array in arrays_of(made))

    assert stored(640) - stored(512) == 128 * tier_row_bytes(tier, columns)


def test_an_8b_body_takes_its_weights_without_the_head_and_its_cache() -> None:
    told = configuration(kv_cache_bytes=8 * GIB)
    parts = dict(body_memory(LLAMA, told, 0, on_gpu=True))
    assert parts == {
        "body": 2 * (8_030_261_248 - 128_256 * 4096),
        "KV cache": 8 * GIB,
    }
    # 2 * 32 layers * 8 heads * 128 numbers of 2 bytes are 128 KiB a token, everywhere; of 4, where
    # a CPU computes in float32, twice as much.
    for on_gpu in (True, False):
        assert kv_blocks(LLAMA, told, 0, on_gpu=on_gpu) * 16 == 8 * GIB // (128 * 1024)
    wide = replace(LLAMA, weight_bytes=4, cpu_kv_bytes=4)
    assert kv_blocks(wide, told, 0, on_gpu=False) * 16 == 8 * GIB // (256 * 1024)
    # Without a wish a tenth of the node's memory, at least a sequence.
    assert kv_blocks(LLAMA, configuration(), 160 * GIB, on_gpu=True) * 16 == 16 * 8192
    assert kv_blocks(LLAMA, configuration(), 1 * GIB, on_gpu=True) * 16 == 8192


# -- nodes and placement --------------------------------------------------------------------------


def test_nodes_are_told_in_words() -> None:
    nodes = parse_nodes(["2x cpus=16, memory=64GiB, gpus=4, gpu_memory=80GiB", "cpus=2,memory=8GB"])
    assert [node.name for node in nodes] == ["node 0", "node 1", "node 2"]
    assert (nodes[1].cpus, nodes[1].gpus, nodes[1].gpu_memory) == (16, 4, 80 * GIB)
    assert (nodes[2].memory, nodes[2].gpus) == (8 * 10**9, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cpu=4,memory=1GiB", "has no 'cpu': did you mean cpus?"),
        ("cpus=four,memory=1GiB", "cpus is a whole number, not 'four'"),
        ("cpus=4,memory=much", "memory is a size such as 64GiB, not 'much'"),
        ("cpus=4", "says no memory"),
        ("cpus=4,memory=1GiB,gpus=2", "says no gpu_memory"),
        ("cpus=0,memory=1GiB", "cpus is a whole number, not '0'"),
        ("", "has no ''"),
        ("0x cpus=1,memory=1GiB", "0 times: give 1 to 10,000"),
        ("999999999x cpus=1,memory=1GiB", "999999999 times"),
    ],
)
def test_bad_nodes_are_told(text: str, told: str) -> None:
    with pytest.raises(NodesError, match=told.replace("?", r"\?")):
        parse_nodes([text])


@settings(max_examples=100, deadline=None)
@given(
    cpus=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    gpus=st.integers(0, 3),
    asked=st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
        min_size=1,
        max_size=12,
    ),
)
def test_nothing_is_placed_where_there_is_no_room(
    cpus: list[int], gpus: int, asked: list[tuple[float, float]]
) -> None:
    nodes = [NodeResources(str(n), count, 8 * GIB, gpus, GIB) for n, count in enumerate(cpus)]
    roles = [
        Role("shard", f"shard {n}", cpu, gpu, (("rows", GIB // 4),))
        for n, (cpu, gpu) in enumerate(asked)
    ]
    try:
        placement = place(roles, nodes)
    except PlacementError:
        return
    assert [each.role for each in placement.placed] == roles
    assert (placement.strategy == "STRICT_PACK") == (len(placement.nodes) == 1)
    for node, bundle in zip(placement.nodes, placement.bundles, strict=True):
        here = [each for each in placement.placed if each.node == node]
        assert bundle["CPU"] == sum(each.role.cpus for each in here) <= cpus[node]
        assert bundle.get("GPU", 0.0) == sum(each.role.gpus for each in here)
        for gpu in range(gpus):
            on_it = [each.role for each in here if each.gpu == gpu]
            assert sum(role.gpus for role in on_it) <= 1
            assert sum(role.bytes for role in on_it) <= USABLE_SHARE * GIB
        assert all((each.gpu is None) == (each.role.gpus == 0) for each in here)


def planned(
    shards: int,
    nodes: tuple[NodeResources, ...] = (GPUS,),
    resources: RoleResources | None = None,
    model: ModelSizes = LLAMA,
    **changes: Any,
) -> TopologyPlan:
    assignment = assign("blocks-round-robin", model.vocabulary_size, shards)
    told = configuration(**{"samplers": 2, "kv_cache_bytes": 8 * GIB} | changes)
    resources = resources or RoleResources(body_gpus=1.0, shard_gpus=1.0)
    return plan_topology(model, told, assignment, nodes, resources)


def test_a_gang_fills_one_node_before_the_next() -> None:
    plan = planned(4)
    assert plan.placement.strategy == "STRICT_PACK"
    assert plan.placement.bundles == ({"CPU": 6.0, "GPU": 4.0},)
    assert [each.gpu for each in plan.placement.placed] == [0, 1, 2, 3]
    two = planned(6, nodes=(GPUS, replace(GPUS, name="b")))
    assert two.placement.strategy == "SPREAD"
    assert two.placement.bundles == ({"CPU": 6.0, "GPU": 4.0}, {"CPU": 2.0, "GPU": 2.0})
    for device in two.devices:
        assert device.used <= USABLE_SHARE * device.total


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"shards": 5},
            r"shard 4: it needs 1 GPU, and no GPU has more than 0 left; .*add nodes",
        ),
        (
            {"shards": 1, "kv_cache_bytes": 70 * GIB},
            r"cannot place the engine: it needs .* GiB of GPU memory, .* 72.00 GiB left; "
            r"lower --kv-cache-memory",
        ),
        (
            {"shards": 1, "resources": RoleResources(), "nodes": (replace(GPUS, memory=32 * GIB),)},
            r"cannot place the engine: it needs .* GiB of memory",
        ),
        (
            {"shards": 3, "samplers": 14, "sampler_placement": "ray"},
            r"cannot place sampler 13: it needs 1 CPU, .*--samplers",
        ),
        ({"shards": 1, "tensor_parallel": 8}, r"rank 4: it needs 1 GPU, .*--tensor-parallel"),
    ],
)
def test_what_finds_no_room_is_told_with_what_to_do(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PlacementError, match=told):
        planned(**changes)


def test_the_demo_has_a_plan() -> None:
    sizes = read_model_sizes(DEMO)
    assert (sizes.vocabulary_size, sizes.hidden_size, sizes.weight_bytes) == (16_384, 256, 2)
    assert sizes.output_parameters == 0
    plan = planned(2, model=sizes, kv_cache_bytes=None)
    text = describe(plan)
    assert "lexshard-demo (llama): 16,384 tokens x 256" in text
    assert plan.kv_tokens == 64 * 2048
