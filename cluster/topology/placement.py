"""Which node and device every role of a gang gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lexshard.cluster.topology.nodes import USABLE_SHARE, NodeResources

RoleKind = Literal["body", "drafter", "shard", "spare", "sampler"]
Strategy = Literal["STRICT_PACK", "SPREAD"]
Parts = tuple[tuple[str, int], ...]  # name, bytes
_SLACK = 1e-9  # of sums of fractions

# What else could be done about a role, by what is missing for it.
_REMEDIES: dict[RoleKind, dict[str, str]] = {
    "body": {
        "CPU": "lower --cpus-per-body",
        "GPU": "give --gpus-per-body 0",
        "GPU memory": "lower --kv-cache-memory",
        "memory": "lower --kv-cache-memory",
    },
    "drafter": {"CPU": "lower --cpus-per-drafter", "memory": "draft with ngram"},
    "shard": {
        "CPU": "lower --cpus-per-shard or --shards",
        "GPU": "lower --gpus-per-shard or --shards",
        "GPU memory": "give more --shards or fewer tiers",
        "memory": "give more --shards or fewer tiers",
    },
    "spare": {
        "CPU": "lower --cpus-per-shard or --shard-spares",
        "GPU": "lower --gpus-per-shard or --shard-spares",
        "GPU memory": "lower --shard-spares",
        "memory": "lower --shard-spares",
    },
    "sampler": {
        "CPU": "lower --cpus-per-sampler or --samplers",
        "memory": "lower --samplers or --max-batch-size",
    },
}
_ORDER = ("CPU", "GPU", "memory", "GPU memory")


class PlacementError(ValueError):
    """What could not be placed, with one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Role:
    """A process of the gang. ``parts`` lie on its GPU where ``gpus`` (a share of one, at most 1) is
    above zero; ``least_bytes`` is what it needs at some time, if that is more than all parts."""

    kind: RoleKind
    name: str
    cpus: float
    gpus: float
    parts: Parts
    least_bytes: int = 0

    @property
    def bytes(self) -> int:
        return max(sum(count for _, count in self.parts), self.least_bytes)


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


@dataclass(slots=True)
class _Free:
    """What is left of a node."""

    cpus: float
    memory: float
    gpus: list[float]
    gpu_memory: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, node: NodeResources) -> _Free:
        return cls(
            node.cpus,
            USABLE_SHARE * node.memory,
            [1.0] * node.gpus,
            [USABLE_SHARE * node.gpu_memory] * node.gpus,
        )

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


def place(roles: Sequence[Role], nodes: Sequence[NodeResources]) -> Placement:
    """Every role in turn on the first node that has room, so that a gang spans few nodes; but a
    spare where no shard is, if it can be, so that they are not lost together.

    Raises PlacementError naming the role that finds none, what it lacks and what to do.
    """
    free = [_Free.of(node) for node in nodes]
    placed: list[PlacedRole] = []
    for role in roles:
        lacking: list[tuple[str, float]] = []
        order = list(range(len(free)))
        if role.kind == "spare":
            order.sort(key={each.node for each in placed if each.role.kind == "shard"}.__contains__)
        for number in order:
            found = free[number].take(role)
            if not isinstance(found, tuple):
                placed.append(PlacedRole(role, number, found))
                break
            lacking.append(found)
        else:
            raise PlacementError(_told(role, lacking))
    used = tuple(sorted({each.node for each in placed}))
    bundles = []
    for node in used:
        here = [each.role for each in placed if each.node == node]
        bundle = {"CPU": sum(role.cpus for role in here), "GPU": sum(role.gpus for role in here)}
        bundles.append({name: round(amount, 6) for name, amount in bundle.items() if amount > 0})
    strategy: Strategy = "STRICT_PACK" if len(used) == 1 else "SPREAD"
    return Placement(tuple(placed), strategy, used, tuple(bundles))


def _told(role: Role, lacking: Sequence[tuple[str, float]]) -> str:
    """``lacking`` is what is missing on each node, and how much is left: what nearly sufficed is
    told, for that is least to change."""
    what = max((name for name, _ in lacking), key=_ORDER.index)
    left = max(amount for name, amount in lacking if name == what)
    where = "GPU" if what.startswith("GPU") else "node"
    if what in ("CPU", "GPU"):
        wants = f"{role.cpus if what == 'CPU' else role.gpus:g} {what}"
        most = f"{left:g}"
    else:
        wants, most = f"{_gibibytes(role.bytes)} of {what}", _gibibytes(left)
    return (
        f"cannot place {role.name}: it needs {wants}, and no {where} has more than {most} left; "
        f"{_REMEDIES[role.kind][what]}, or add nodes"
    )


def _gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
