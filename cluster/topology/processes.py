"""The processes of a gang: what each needs is given in one place, for placing and for reserving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RoleKind = Literal["engine", "rank", "shard", "spare", "sampler"]
Parts = tuple[tuple[str, int], ...]  # name, bytes


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
class Processes:
    """``engine`` is body, drafter, first shard and every sampler that is no actor; the others are
    Ray actors of their own: ``ranks`` of a parallel body, each with its shard where there are as
    many, and else ``shards`` from number 1 on."""

    engine: Role
    ranks: tuple[Role, ...]
    shards: tuple[Role, ...]
    spares: tuple[Role, ...]
    samplers: tuple[Role, ...]

    @property
    def all(self) -> tuple[Role, ...]:
        """In the order in which they are placed."""
        return (self.engine, *self.ranks, *self.shards, *self.spares, *self.samplers)
