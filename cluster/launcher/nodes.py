"""The nodes that a file of `ray up` gives, as its author wrote them, before any of them exists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from lexshard.cluster.launcher.file import ClusterFile, ClusterFileError
from lexshard.cluster.launcher.schema import GPU_MEMORY_LABEL

_OPTION = re.compile(r"--([a-z-]+)(?:=|\s+)(\S+)")


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """From ``least`` to ``most`` nodes of one kind; memory in bytes, ``gpu_memory`` of each GPU."""

    name: str
    least: int
    most: int
    cpus: int
    gpus: int
    memory: int
    gpu_memory: int

    @property
    def specification(self) -> str:
        """As `cluster.topology.nodes.parse_nodes` reads it."""
        gpus = f",gpus={self.gpus},gpu_memory={self.gpu_memory}" if self.gpus else ""
        return f"{self.most}x cpus={self.cpus},memory={self.memory}{gpus}"


def node_groups(file: ClusterFile) -> tuple[NodeGroup, ...]:
    """The head, then the workers by type.

    Raises ClusterFileError where a node's resources are not explicit: Ray would count what it finds
    at the start, and nothing could be planned before.
    """
    groups = _on_premises(file) if file.provider == "local" else _of_types(file)
    return tuple(groups)


def _of_types(file: ClusterFile) -> Iterator[NodeGroup]:
    types: dict[str, Any] = file.prepared["available_node_types"]
    head = file.prepared["head_node_type"]
    for name in sorted(types, key=lambda name: name != head):
        node = types[name]
        ours = 1 if name == head else 0
        yield _group(
            file,
            name,
            (node["min_workers"] + ours, node["max_workers"] + ours),
            node["resources"],
            node.get("labels", {}),
            f"available_node_types.{name}",
        )


def _on_premises(file: ClusterFile) -> Iterator[NodeGroup]:
    workers = len(file.content["provider"]["worker_ips"])
    for name, count in (("head", 1), ("worker", workers)):
        key = f"{name}_start_ray_commands"
        options = _start_options(file.prepared[key])
        resources = {
            resource: _whole(file, key, f"--{option}", options[option])
            for resource, option in (("CPU", "num-cpus"), ("GPU", "num-gpus"), ("memory", "memory"))
            if option in options
        }
        labels = dict(each.split("=", 1) for each in options.get("labels", "").split(",") if each)
        if count:
            yield _group(file, name, (count, count), resources, labels, key)


def _start_options(commands: Sequence[str]) -> dict[str, str]:
    """The options of the `ray start` among ``commands``, without their dashes."""
    start = next((each for each in commands if re.search(r"\bray start\b", each)), "")
    return dict(_OPTION.findall(start))


def _whole(file: ClusterFile, key: str, option: str, text: str) -> int:
    if not text.isdecimal():
        raise ClusterFileError(f"{file.path}: {key}: {option} is a whole number, not {text!r}")
    return int(text)


def _group(
    file: ClusterFile,
    name: str,
    count: tuple[int, int],
    resources: dict[str, int],
    labels: dict[str, str],
    where: str,
) -> NodeGroup:
    cpus, gpus = resources.get("CPU"), resources.get("GPU", 0)
    if cpus is None or (cpus and "memory" not in resources):
        what = "CPU" if cpus is None else "memory"
        raise ClusterFileError(
            f"{file.path}: {where} says no {what}: Ray would take what it finds (local: "
            "give --num-cpus, --num-gpus and --memory to `ray start`)"
        )
    if gpus and GPU_MEMORY_LABEL not in labels:
        raise ClusterFileError(
            f"{file.path}: {where} has GPUs but no label {GPU_MEMORY_LABEL}, such as 24GB: "
            "Ray does not know how much memory each has"
        )
    text = labels.get(GPU_MEMORY_LABEL, "0")
    try:
        gpu_memory = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise ClusterFileError(
            f"{file.path}: {where}: {GPU_MEMORY_LABEL} is a size such as 24GB, not {text!r}"
        ) from error
    return NodeGroup(name, *count, cpus, gpus, resources.get("memory", 0), gpu_memory)
