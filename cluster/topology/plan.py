"""A whole topology before anything starts: who owns what, who runs where, what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.index.metadata import Metadata
from lexshard.cluster.topology.assignment import ShardAssignment, ShardAssignmentMethod
from lexshard.cluster.topology.memory import (
    body_memory,
    cached_tokens,
    drafter_memory,
    kv_blocks,
    loading_bytes,
    sampler_memory,
    shard_memory,
)
from lexshard.cluster.topology.model_sizes import ModelSizes
from lexshard.cluster.topology.nodes import USABLE_SHARE, NodeResources
from lexshard.cluster.topology.placement import PlacedRole, Placement, Role, place
from lexshard.cluster.topology.wire import (
    WireBytes,
    candidates_left,
    hidden_state_bytes,
    wire_bytes,
)

# The largest share over the mean that is called even.
EVEN = 1.05


@dataclass(frozen=True, slots=True)
class RoleResources:
    """What each process of a kind asks of its node, by shares of a CPU or GPU; at most one GPU."""

    body_cpus: float = 1.0
    shard_cpus: float = 1.0
    sampler_cpus: float = 1.0
    drafter_cpus: float = 1.0
    body_gpus: float = 0.0
    shard_gpus: float = 0.0


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
    """A node's memory or that of one of its GPUs, in bytes, and who takes what of it."""

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


def plan_topology(
    model: ModelSizes,
    configuration: EngineConfiguration,
    assignment: ShardAssignment,
    nodes: Sequence[NodeResources],
    resources: RoleResources,
    *,
    draft: ModelSizes | None = None,
    index: Metadata | None = None,
    nucleus_tokens: int = 256,
) -> TopologyPlan:
    """Place the gang of ``configuration`` on ``nodes`` and add up what it takes.

    ``draft`` are the sizes of its draft model, ``index`` what the model's index says of itself.
    ``nucleus_tokens`` is how many tokens each shard is taken to tell of a top-p row.

    Raises PlacementError where a role finds no room.
    """
    rows = assignment.rows
    host = _body_node(nodes, resources)
    blocks = kv_blocks(model, configuration, host.memory, on_gpu=resources.body_gpus > 0)
    placement = place(roles_of(model, configuration, rows, nodes, resources, draft), nodes)
    left = candidates_left(index, configuration.tiers)
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
        devices=_devices(placement.placed, nodes),
        kv_tokens=cached_tokens(blocks),
        wire=wire_bytes(model.vocabulary_size, rows, left, nucleus_tokens),
        hidden_state_bytes=hidden_state_bytes(model.hidden_size),
        notes=(
            *_notes_on_balance(assignment),
            *_notes_on_devices(placement.placed, nodes),
            *_notes_on_wire(index, nucleus_tokens),
        ),
    )


def _body_node(nodes: Sequence[NodeResources], resources: RoleResources) -> NodeResources:
    """Whose memory decides how large an automatic KV cache is: the body goes first."""
    return next((node for node in nodes if node.gpus or not resources.body_gpus), nodes[0])


def roles_of(
    model: ModelSizes,
    configuration: EngineConfiguration,
    rows: Sequence[int],
    nodes: Sequence[NodeResources],
    resources: RoleResources,
    draft: ModelSizes | None = None,
) -> list[Role]:
    """The gang of ``configuration`` whose shards own so many ``rows``, in the order in which roles
    are placed on ``nodes``."""
    host = _body_node(nodes, resources)
    blocks = kv_blocks(model, configuration, host.memory, on_gpu=resources.body_gpus > 0)
    on_gpu, shards_on_gpu = resources.body_gpus > 0, resources.shard_gpus > 0
    roles = [
        Role(
            "body",
            "the body",
            resources.body_cpus,
            resources.body_gpus,
            body_memory(model, configuration, host.memory, on_gpu=on_gpu),
            loading_bytes(model, configuration, on_gpu=on_gpu),
        )
    ]
    if draft is not None:
        parts = drafter_memory(draft, blocks)
        roles.append(Role("drafter", "the drafter", resources.drafter_cpus, 0.0, parts))
    roles += [
        Role(
            "shard",
            f"shard {number}",
            resources.shard_cpus,
            resources.shard_gpus,
            shard_memory(model, own, configuration, on_gpu=shards_on_gpu),
        )
        for number, own in enumerate(rows)
    ]
    return roles + [
        Role(
            "sampler",
            f"sampler {number}",
            resources.sampler_cpus,
            0.0,
            sampler_memory(model, configuration),
        )
        for number in range(configuration.samplers)
    ]


def _devices(
    placed: Sequence[PlacedRole], nodes: Sequence[NodeResources]
) -> tuple[PlannedDevice, ...]:
    devices = []
    for number, node in enumerate(nodes):
        sizes = {None: node.memory} | dict.fromkeys(range(node.gpus), node.gpu_memory)
        for gpu, total in sizes.items():
            here = [each.role for each in placed if (each.node, each.gpu) == (number, gpu)]
            name = node.name if gpu is None else f"{node.name}, GPU {gpu}"
            used = sum(role.bytes for role in here)
            devices.append(PlannedDevice(name, total, used, tuple(role.name for role in here)))
    return tuple(devices)


def _notes_on_balance(assignment: ShardAssignment) -> list[str]:
    notes = []
    if assignment.row_balance > EVEN:
        notes.append(
            f"the largest shard has {assignment.row_balance - 1:.0%} more rows than the mean, and "
            "every step waits for it: assign blocks, or fewer shards"
        )
    if assignment.work is not None and assignment.work_balance is not None:
        share = max(assignment.work)
        if assignment.work_balance > EVEN:
            notes.append(
                f"shard {assignment.work.index(share)} owns {share:.0%} of the trace's tokens: it "
                "rescores more than the others, though all screen alike"
            )
    if not assignment.by_block:
        notes.append(
            "tokens of clusters have their noise drawn one by one, at about a hundred times the "
            "price of a block's: assign blocks unless the paper's mode needs clusters"
        )
    return notes


def _notes_on_devices(placed: Sequence[PlacedRole], nodes: Sequence[NodeResources]) -> list[str]:
    on_gpus = sorted(
        (each for each in placed if each.gpu is not None and each.role.kind == "shard"),
        key=lambda each: (each.node, each.gpu),
    )
    notes = []
    for (node, gpu), group in groupby(on_gpus, key=lambda each: (each.node, each.gpu)):
        names = [each.role.name for each in group]
        if len(names) > 1:
            notes.append(
                f"{' and '.join(names)} share GPU {gpu} of {nodes[node].name}: NCCL refuses two "
                "ranks on one device, so they exchange over GLOO"
            )
    notes.append(
        f"{1 - USABLE_SHARE:.0%} of every memory is left for interpreters, CUDA and activations"
    )
    return notes


def _notes_on_wire(index: Metadata | None, nucleus_tokens: int) -> list[str]:
    told = (
        "candidates are those that the index's calibration left"
        if index is not None
        else "no index of these weights here: candidates are counted as if bounds left only those "
        "that are asked for"
    )
    return [
        f"{told}; for top-p each shard is taken to tell {nucleus_tokens} tokens, and what is not "
        "certified is dense"
    ]
