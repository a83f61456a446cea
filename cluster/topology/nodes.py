"""What the nodes of a cluster have, as it is told on a command line or found on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ByteSize, TypeAdapter, ValidationError

from lexshard.actors.machine import physical_memory
from lexshard.cluster.nearest import did_you_mean

# The rest is for interpreters, CUDA's context and the activations of a step.
USABLE_SHARE = 0.9

MOST_NODES = 10_000
_COUNTS, _SIZES = ("cpus", "gpus"), ("memory", "gpu_memory")
EXAMPLE = "2x cpus=16,memory=64GiB,gpus=4,gpu_memory=80GiB"


class NodesError(ValueError):
    """Nodes that cannot be planned with, with one line that says what to do."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """``memory`` and, of each of its GPUs, ``gpu_memory`` in bytes."""

    name: str
    cpus: float
    memory: int
    gpus: int = 0
    gpu_memory: int = 0


def this_machine() -> NodeResources:
    """The CPUs, memory and GPUs that are here."""
    import torch

    from lexshard.kernels.team.cores import available_cores  # brings numba

    gpus = torch.cuda.device_count()
    memory = min((torch.cuda.mem_get_info(gpu)[1] for gpu in range(gpus)), default=0)
    return NodeResources("this machine", available_cores(), physical_memory(), gpus, memory)


def parse_nodes(specifications: Sequence[str]) -> tuple[NodeResources, ...]:
    """Nodes from such as ``EXAMPLE``, named by their number.

    Raises NodesError naming what is wrong with which of them.
    """
    nodes: list[NodeResources] = []
    for text in specifications:
        repeated = re.match(r"\s*(\d{1,9}) *x *", text)
        resources = text[repeated.end() :] if repeated else text
        values = dict(_value(part, text) for part in resources.split(","))
        needed = ("cpus", "memory", "gpu_memory") if values.get("gpus") else ("cpus", "memory")
        missing = [name for name in needed if name not in values]
        if missing:
            raise NodesError(f"node '{text}' says no {', '.join(missing)}: write it as '{EXAMPLE}'")
        count = int(repeated.group(1)) if repeated else 1
        if not 1 <= count <= MOST_NODES:
            raise NodesError(f"node '{text}' is there {count} times: give 1 to {MOST_NODES:,}")
        for _ in range(count):
            nodes.append(NodeResources(f"node {len(nodes)}", **values))
    return tuple(nodes)


def _value(part: str, text: str) -> tuple[str, int]:
    name, _, value = (word.strip() for word in part.partition("="))
    if name not in (*_COUNTS, *_SIZES):
        raise NodesError(f"node '{text}' has no '{name}'{did_you_mean(name, _COUNTS + _SIZES)}")
    try:
        number = TypeAdapter(int if name in _COUNTS else ByteSize).validate_python(value)
    except ValidationError:
        number = -1
    if number < (0 if name == "gpus" else 1):
        wanted = "a whole number" if name in _COUNTS else "a size such as 64GiB"
        raise NodesError(f"node '{text}': {name} is {wanted}, not '{value}'")
    return name, int(number)
