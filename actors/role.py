"""Who plays which role, and where: what ``lexshard status`` shows."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Literal, NamedTuple

RoleName = Literal["api", "body", "shard", "sampler", "drafter"]


class Place(NamedTuple):
    """A process of a machine; ``node`` is the name that a cluster has for that machine, empty
    outside of one."""

    host: str
    process_id: int
    node: str = ""


def here() -> Place:
    """This process."""
    return Place(platform.node(), os.getpid())


@dataclass(frozen=True, slots=True)
class RunningRole:
    """A role of a running server, and where it runs; ``detail`` is its share of the work."""

    name: RoleName
    index: int
    place: Place
    device: str
    detail: str
