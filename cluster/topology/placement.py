"""Which node and device every role of a gang gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lexshard.cluster.topology.nodes import USABLE_SHARE, NodeResources
from lexshard.cluster.topology.processes import Role, RoleKind

Strategy = Literal["STRICT_PACK", "SPREAD"]
_SLACK = 1e-9  # of sums of fractions

# What can be done about a process that lacks CPUs, a GPU, memory.
_REMEDIES: dict[RoleKind, tuple[str, str, str]] = {
    "engine": ("lower --cpus-per-body", "give --gpus-per-body 0", "lower --kv-cache-memory"),
    "rank": (
        "lower --tensor-parallel or --cpus-per-body",
        "lower --tensor-parallel",
        "give more --tensor-parallel",
    ),
    "shard": (
        "lower --cpus-per-shard or --shards",
        "lower --gpus-per-shard or --shards",
        "give more --shards or fewer tiers",
    ),
    "spare": ("lower --shard-spares",) * 3,
    "sampler": ("lower --cpus-per-sampler or --samplers", "", "lower --samplers"),
}
_WANTED = ("CPU", "GPU", "memory", "GPU memory")  # what nearly sufficed last


class PlacementError(ValueError):
    """What could not be placed, with one line that says what to do."""


@dataclass(frozen=True, slots=True)
class PlacedRole:
    """``gpu`` is the number of its GPU on the node, None without one."""

    role: Role
    node: int
    gpu: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """``bundles`` are for a Ray placement group with ``strategy``: one for each of ``nodes``, which
    holds what all roles there ask for. Memory is no part of them: Ray's count of it is not ours.
    ``SPREAD`` keeps them apart where it can, and lets what a lost node held go to another that is
    left."""

    placed: tuple[PlacedRole, ...]
    strategy: Strategy
    nodes: tuple[int, ...]
    bundles: tuple[dict[str, float], ...]


class _Free:
    """What is left of a node."""

    def __init__(self, node: NodeResources) -> None:
        self.cpus = node.cpus
        self.memory = USABLE_SHARE * node.memory
        self.gpus = [1.0] * node.gpus
        self.gpu_memory = [USABLE_SHARE * node.gpu_memory] * node.gpus

    def take(self, role: Role) -> tuple[str, float] | int | None:
        """The GPU that the role gets (None: it needs none), or what it lacks and the most there
        is of that."""
        if self.cpus + _SLACK < role.cpus:
            return "CPU", self.cpus
        gpu = None
        if role.gpus > 0:
            open_gpus = [n for n, left in enumerate(self.gpus) if left + _SLACK >= role.gpus]
            if not open_gpus:
                return "GPU", max(self.gpus, default=0.0)
            gpu = next((n for n in open_gpus if self.gpu_memory[n] >= role.bytes), None)
            if gpu is None:
                return "GPU memory", max(self.gpu_memory[n] for n in open_gpus)
            self.gpus[gpu] -= role.gpus
            self.gpu_memory[gpu] -= role.bytes
        elif self.memory < role.bytes:
            return "memory", self.memory
        else:
            self.memory -= role.bytes
        self.cpus -= role.cpus
        return gpu


def place(roles: Sequence[Role], nodes: Sequence[NodeResources], home: bool = False) -> Placement:
    """Every role in turn on the first node that has room, so that a gang spans few nodes; but a
    spare where no shard is, if it can be, so that they are not lost together, and the engine on
    the first alone where that is its ``home``.

    Raises PlacementError naming the role that finds none, what it lacks and what to do.
    """
    free = [_Free(node) for node in nodes]
    placed: list[PlacedRole] = []
    for role in roles:
        lacking: list[tuple[str, float]] = []
        stays = home and role.kind == "engine"
        order = list(range(len(free)))[: 1 if stays else None]
        if role.kind == "spare":
            order.sort(key={each.node for each in placed if each.role.kind == "shard"}.__contains__)
        for number in order:
            found = free[number].take(role)
            if not isinstance(found, tuple):
                placed.append(PlacedRole(role, number, found))
                break
            lacking.append(found)
        else:
            raise PlacementError(_told(role, lacking, stays=stays))
    used = tuple(sorted({each.node for each in placed}))
    bundles = (bundle_of([each.role for each in placed if each.node == node]) for node in used)
    strategy: Strategy = "STRICT_PACK" if len(used) == 1 else "SPREAD"
    return Placement(tuple(placed), strategy, used, tuple(bundles))


def bundle_of(roles: Sequence[Role]) -> dict[str, float]:
    """What ``roles`` ask for together, as a placement group has it."""
    asked = {"CPU": sum(role.cpus for role in roles), "GPU": sum(role.gpus for role in roles)}
    return {name: round(amount, 6) for name, amount in asked.items() if amount > 0}


def _told(role: Role, lacking: Sequence[tuple[str, float]], *, stays: bool) -> str:
    """``lacking`` is what is missing on each node, here if it ``stays``, and how much is left."""
    what = max((name for name, _ in lacking), key=_WANTED.index)
    left = max(amount for name, amount in lacking if name == what)
    where = "GPU" if what.startswith("GPU") else "node"
    if what.endswith("memory"):
        remedy = 2
        wants, most = f"{role.bytes / 2**30:.2f} GiB of {what}", f"{left / 2**30:.2f} GiB"
    else:
        remedy = _WANTED.index(what)
        wants, most = f"{(role.cpus, role.gpus)[remedy]:g} {what}", f"{left:g}"
    room, more = f"no {where} has more than {most} left", "add nodes"
    if stays:
        room = f"this machine has {most} left, where the engine is because the server is"
        more = "give Ray more here (`ray start --num-cpus`), or use `serve deploy`"
    return (
        f"cannot place {role.name}: it needs {wants}, and {room}; "
        f"{_REMEDIES[role.kind][remedy]}, or {more}"
    )
