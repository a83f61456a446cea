"""A whole topology before anything starts: which rows, which node, which memory and bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.actors.configuration import EngineConfiguration, ShardAssignmentMethod
from lexshard.actors.index.metadata import Metadata
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.topology.assignment import ShardAssignment
from lexshard.cluster.topology.configured import (
    RoleResources,
    body_node,
    configured_assignment,
    index_of,
    role_resources,
    roles_of,
)
from lexshard.cluster.topology.nodes import USABLE_SHARE, NodeResources
from lexshard.cluster.topology.placement import Placement, place
from lexshard.cluster.topology.sizes import FLOAT32, ModelSizes, kv_blocks, read_model_sizes
from lexshard.cluster.topology.wire import WireBytes, candidates_left, wire_bytes

# The largest share over the mean that is called even.
EVEN = 1.05


@dataclass(frozen=True, slots=True)
class PlannedAssignment:
    """A `ShardAssignment` in numbers."""

    method: ShardAssignmentMethod
    rows: tuple[int, ...]
    row_balance: float
    work: tuple[float, ...] | None
    work_balance: float | None


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A node's memory or that of one of its GPUs, in bytes, and the roles that take it."""

    name: str
    total: int
    used: int
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopologyPlan:
    """What `lexshard topology plan` prints. ``hidden_state_bytes`` go to all shards for every
    token, beside what ``wire`` counts."""

    model: ModelSizes
    assignment: PlannedAssignment
    nodes: tuple[NodeResources, ...]
    placement: Placement
    devices: tuple[PlannedDevice, ...]
    kv_tokens: int
    wire: tuple[WireBytes, ...]
    hidden_state_bytes: int
    notes: tuple[str, ...]


def configured_plan(
    config: ServeConfig, nodes: Sequence[NodeResources], nucleus_tokens: int
) -> TopologyPlan:
    """`plan_topology` of the files that ``config`` names, whose weights are not read.

    Raises ValueError (PlacementError where a role finds no room) and OSError.
    """
    engine = config.engine_configuration
    model = read_model_sizes(config.model, engine.dtype)
    found = index_of(engine)
    index = None if found is None else found[1].metadata()
    resources = role_resources(config, on_gpus=any(node.gpus for node in nodes))
    assignment = configured_assignment(engine, model.vocabulary_size)
    return plan_topology(model, engine, assignment, nodes, resources, index, nucleus_tokens)


def plan_topology(
    model: ModelSizes,
    configuration: EngineConfiguration,
    assignment: ShardAssignment,
    nodes: Sequence[NodeResources],
    resources: RoleResources,
    index: Metadata | None = None,
    nucleus_tokens: int = 256,
) -> TopologyPlan:
    """Place the gang of ``configuration`` on ``nodes`` and add up what it takes.

    ``index`` is what the model's index says of itself, ``nucleus_tokens`` how many tokens each
    shard is taken to tell of a top-p row. Raises PlacementError where a role finds no room.
    """
    rows = assignment.rows
    memory = body_node(nodes, resources).memory
    blocks = kv_blocks(model, configuration, memory, on_gpu=resources.body_gpus > 0)
    placement = place(roles_of(model, configuration, rows, nodes, resources), nodes)
    left = candidates_left(index, configuration.tiers)
    devices = _devices(placement, nodes)
    return TopologyPlan(
        model=model,
        assignment=PlannedAssignment(
            assignment.method,
            rows,
            assignment.row_balance,
            assignment.work,
            assignment.work_balance,
        ),
        nodes=tuple(nodes),
        placement=placement,
        devices=devices,
        kv_tokens=blocks * BLOCK_TOKENS,
        wire=wire_bytes(model.vocabulary_size, rows, left, nucleus_tokens),
        hidden_state_bytes=FLOAT32 * model.hidden_size,
        notes=(*_notes(assignment, devices), _note_on_wire(index, nucleus_tokens)),
    )


def _devices(placement: Placement, nodes: Sequence[NodeResources]) -> tuple[PlannedDevice, ...]:
    devices = []
    for number, node in enumerate(nodes):
        sizes = {None: node.memory} | dict.fromkeys(range(node.gpus), node.gpu_memory)
        for gpu, total in sizes.items():
            here = [p.role for p in placement.placed if (p.node, p.gpu) == (number, gpu)]
            name = node.name if gpu is None else f"{node.name}, GPU {gpu}"
            used = sum(role.bytes for role in here)
            devices.append(PlannedDevice(name, total, used, tuple(role.name for role in here)))
    return tuple(devices)


def _notes(assignment: ShardAssignment, devices: Sequence[PlannedDevice]) -> list[str]:
    notes = []
    if assignment.row_balance > EVEN:
        notes.append(
            f"the largest shard has {assignment.row_balance - 1:.0%} more rows than the mean, and "
            "every step waits for it: assign blocks, or fewer shards"
        )
    if assignment.work is not None and (assignment.work_balance or 0.0) > EVEN:
        share = max(assignment.work)
        notes.append(
            f"shard {assignment.work.index(share)} owns {share:.0%} of the trace's tokens: it "
            "rescores more than the others, though all screen alike"
        )
    if not assignment.by_block:
        notes.append(
            "tokens of clusters have their noise drawn one by one, at about a hundred times the "
            "price of a block's: assign blocks unless the paper's mode needs clusters"
        )
    for device in devices:
        shards = [role for role in device.roles if role.startswith("shard")]
        if ", GPU " in device.name and len(shards) > 1:
            notes.append(
                f"{' and '.join(shards)} share {device.name}: NCCL refuses two ranks on one "
                "device, so they exchange over GLOO"
            )
    notes.append(
        f"{1 - USABLE_SHARE:.0%} of every memory is left for interpreters, CUDA and activations"
    )
    return notes


def _note_on_wire(index: Metadata | None, nucleus_tokens: int) -> str:
    told = (
        "candidates are those that the index's calibration left"
        if index is not None
        else "no index of these weights here: candidates are counted as if bounds left only those "
        "that are asked for"
    )
    return (
        f"{told}; for top-p each shard is taken to tell {nucleus_tokens} tokens, and what is not "
        "certified is dense"
    )


def describe(plan: TopologyPlan) -> str:
    """What `lexshard topology plan` prints."""
    model, assignment, work = plan.model, plan.assignment, plan.assignment.work
    names = "shard,rows" if work is None else "shard,rows,of the trace"
    shards = [
        [str(number), f"{own:,}", *([] if work is None else [f"{work[number]:.1%}"])]
        for number, own in enumerate(assignment.rows)
    ]
    balances = (assignment.row_balance, assignment.work_balance)
    even = [f"{balance:.3f}" for balance in balances if balance is not None]
    roles = []
    for each in plan.placement.placed:
        role = each.role
        where = plan.nodes[each.node].name + ("" if each.gpu is None else f", GPU {each.gpu}")
        parts = ", ".join(f"{name} {_bytes(count)}" for name, count in role.parts)
        shares = [f"{role.cpus:g}", f"{role.gpus:g}"]
        roles.append([role.name, where, *shares, _bytes(role.bytes), parts])
    devices = [
        [each.name, _bytes(each.used), _bytes(each.total), ", ".join(each.roles) or "-"]
        for each in plan.devices
    ]
    wire = [
        [
            each.need,
            *(f"{count:,}" for count in (each.per_shard, each.all_shards, each.full_logits)),
            f"{each.saving:.1f}x",
        ]
        for each in plan.wire
    ]
    bundles = json.dumps(plan.placement.bundles, separators=(", ", ": "))
    return "\n".join(
        [
            f"{model.name} ({model.family}): {model.vocabulary_size:,} tokens x "
            f"{model.hidden_size:,}, {model.parameters:,} parameters of {model.weight_bytes} "
            f"bytes, KV cache of {plan.kv_tokens:,} tokens",
            f"\nassignment {assignment.method}",
            *_table(names, *shards, ["largest / mean", *even]),
            f"\nplacement {plan.placement.strategy}, bundles {bundles}",
            *_table("role,on,CPUs,GPUs,memory,of which", *roles, left=(0, 1, 5)),
            "\nmemory",
            *_table("device,used,of,by", *devices, left=(0, 3)),
            f"\nbytes per token on the wire (beside {plan.hidden_state_bytes:,} of the hidden "
            "state, which goes to all shards at once)",
            *_table("need,per shard,all shards,full logits,fewer", *wire),
            "",
            *(f"note: {note}" for note in plan.notes),
        ]
    )


def _table(names: str, *rows: Sequence[str], left: Sequence[int] = (0,)) -> list[str]:
    """Columns as wide as their widest cell; those in ``left`` begin flush left."""
    lines = [names.split(","), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return [("  " + "  ".join(line)).rstrip() for line in aligned]


def _bytes(count: float) -> str:
    unit = next(i for i in range(4) if count < 1024 ** (i + 1) or i == 3)
    return f"{count:.0f} B" if unit == 0 else f"{count / 1024**unit:.1f} {'KMG'[unit - 1]}iB"
