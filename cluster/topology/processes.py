"""The processes of a gang: which roles share one, for what they share goes to one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.actors.configuration import EngineConfiguration
from lexshard.cluster.topology.placement import Role


@dataclass(frozen=True, slots=True)
class Processes:
    """``engine`` is body, drafter, first shard and every sampler that is no actor; the others are
    Ray actors of their own, ``shards`` from rank 1 on."""

    engine: Role
    shards: tuple[Role, ...]
    spares: tuple[Role, ...]
    samplers: tuple[Role, ...]

    @property
    def all(self) -> tuple[Role, ...]:
        """In the order in which they are placed."""
        return (self.engine, *self.shards, *self.spares, *self.samplers)


def processes_of(roles: Sequence[Role], configuration: EngineConfiguration) -> Processes:
    """``roles`` (see `cluster.topology.configured.roles_of`) by process.

    Body, drafter and first shard compute in turn, so that the engine needs as many CPUs, and as
    much of one GPU, as the largest of them; its samplers need theirs besides.
    """
    shards = [role for role in roles if role.kind == "shard"]
    samplers = [role for role in roles if role.kind == "sampler"]
    in_turn = [role for role in roles if role.kind in ("body", "drafter")] + shards[:1]
    beside = [] if configuration.sampler_placement == "ray" else samplers
    parts = tuple(part for role in (*in_turn, *beside) for part in role.parts)
    engine = Role(
        "body",
        "the engine",
        max(role.cpus for role in in_turn) + sum(role.cpus for role in beside),
        max(role.gpus for role in in_turn),
        parts,
        max(role.least_bytes for role in in_turn),
    )
    largest = max(shards, key=lambda role: role.bytes)
    spares = tuple(
        Role("spare", f"spare shard {number}", largest.cpus, largest.gpus, largest.parts)
        for number in range(configuration.shard_spares)
        if len(shards) > 1
    )
    actors = () if beside else tuple(samplers)
    return Processes(engine, tuple(shards[1:]), spares, actors)
