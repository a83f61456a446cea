"""A whole topology before anything starts: which rows, which node, which memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.actors.configuration import EngineConfiguration, ShardAssignmentMethod
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.models.progress import in_units
from lexshard.cluster.topology.assignment import ShardAssignment
from lexshard.cluster.topology.configured import (
    RoleResources,
    configured_assignment,
    index_of,
    processes_of,
    role_resources,
)
from lexshard.cluster.topology.nodes import USABLE_SHARE, NodeResources
from lexshard.cluster.topology.placement import Placement, place
from lexshard.cluster.topology.sizes import ModelSizes, kv_blocks, read_model_sizes
from lexshard.cluster.topology.tables import table

# The largest share over the mean that is called even.
EVEN = 1.05


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A node's memory or that of one of its GPUs, in bytes, and the processes that take it."""

    name: str
    total: int
    used: int
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopologyPlan:
    """What `lexshard topology plan` prints. ``rows`` and ``work`` are per shard, as a
    `ShardAssignment` has them."""

    model: ModelSizes
    method: ShardAssignmentMethod
    rows: tuple[int, ...]
    row_balance: float
    work: tuple[float, ...] | None
    work_balance: float | None
    nodes: tuple[NodeResources, ...]
    placement: Placement
    devices: tuple[PlannedDevice, ...]
    kv_tokens: int
    notes: tuple[str, ...]


def configured_plan(config: ServeConfig, nodes: Sequence[NodeResources]) -> TopologyPlan:
    """`plan_topology` of the files that ``config`` names, whose weights are not read.

    Raises ValueError (PlacementError where a process finds no room) and OSError.
    """
    engine = config.engine_configuration
    model = read_model_sizes(config.model, engine.dtype)
    index_of(engine)  # one that is named is there, and fits
    resources = role_resources(config, on_gpus=any(node.gpus for node in nodes))
    assignment = configured_assignment(engine, model.vocabulary_size)
    return plan_topology(model, engine, assignment, nodes, resources)


def plan_topology(
    model: ModelSizes,
    configuration: EngineConfiguration,
    assignment: ShardAssignment,
    nodes: Sequence[NodeResources],
    resources: RoleResources,
) -> TopologyPlan:
    """Place the gang of ``configuration`` on ``nodes`` and add up what it takes.

    Raises PlacementError where a process finds no room.
    """
    on_gpu = resources.body_gpus > 0
    # The engine goes first: the memory of its node decides how large an automatic KV cache is.
    home = next((node for node in nodes if node.gpus or not on_gpu), nodes[0])
    processes = processes_of(model, configuration, assignment.rows, home, resources)
    placement = place(processes.all, nodes)
    return TopologyPlan(
        model,
        assignment.method,
        assignment.rows,
        assignment.row_balance,
        assignment.work,
        assignment.work_balance,
        tuple(nodes),
        placement,
        _devices(placement, nodes),
        kv_blocks(model, configuration, home.memory, on_gpu=on_gpu) * BLOCK_TOKENS,
        tuple(_notes(assignment)),
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


def _notes(assignment: ShardAssignment) -> list[str]:
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
    if assignment.method.startswith("clusters"):
        notes.append(
            "tokens of clusters have their noise drawn one by one, at about a hundred times the "
            "price of a block's: assign blocks unless the paper's mode needs clusters"
        )
    free = f"{1 - USABLE_SHARE:.0%} of every memory is left for interpreters, CUDA and activations"
    return [*notes, free]


def describe(plan: TopologyPlan) -> str:
    """What `lexshard topology plan` prints."""
    model, work = plan.model, plan.work
    shards = [
        [str(number), f"{own:,}", *([] if work is None else [f"{work[number]:.1%}"])]
        for number, own in enumerate(plan.rows)
    ]
    balances = (plan.row_balance, plan.work_balance)
    even = [f"{balance:.3f}" for balance in balances if balance is not None]
    processes = []
    for each in plan.placement.placed:
        role = each.role
        where = plan.nodes[each.node].name + ("" if each.gpu is None else f", GPU {each.gpu}")
        parts = ", ".join(f"{name} {in_units(count)}" for name, count in role.parts)
        shares = [f"{role.cpus:g}", f"{role.gpus:g}"]
        processes.append([role.name, where, *shares, in_units(role.bytes), parts])
    devices = [
        [each.name, in_units(each.used), in_units(each.total), ", ".join(each.processes) or "-"]
        for each in plan.devices
    ]
    return "\n".join(
        [
            f"{model.name} ({model.family}): {model.vocabulary_size:,} tokens x "
            f"{model.hidden_size:,}, {model.parameters:,} parameters of {model.weight_bytes} "
            f"bytes, KV cache of {plan.kv_tokens:,} tokens",
            f"\nassignment {plan.method}",
            *table(
                "shard,rows" if work is None else "shard,rows,of the trace",
                *shards,
                ["largest / mean", *even],
            ),
            f"\nplacement {plan.placement.strategy}, bundles {json.dumps(plan.placement.bundles)}",
            *table("process,on,CPUs,GPUs,memory,of which", *processes, left=(0, 1, 5)),
            "\nmemory",
            *table("device,used,of,by", *devices, left=(0, 3)),
            "",
            *(f"note: {note}" for note in plan.notes),
        ]
    )
