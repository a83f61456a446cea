"""Files of `ray up`: what may stand in them, the nodes that they give, and advice about them.

Ray validates a file by its own schema, which is open where a provider, a node's resources or its
labels stand: a misspelt key there costs a cluster that starts with less than it was told. What goes
to a cloud's API (``node_config``) is left to that, which refuses what it does not know.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError

from lexshard.cluster.nearest import did_you_mean
from lexshard.cluster.strict_yaml import StrictLoader

GPU_MEMORY_LABEL = "lexshard/gpu-memory"
# As node providers and their bootstrapping read them.
_ANY_PROVIDER = {"type", "use_internal_ips", "disable_node_updaters"}
_CLOUD = _ANY_PROVIDER | {"region", "availability_zone", "cache_stopped_nodes"}
PROVIDERS = {
    "local": _ANY_PROVIDER | {"head_ip", "worker_ips", "external_head_ip"},
    "aws": _CLOUD | {"security_group"},
    "gcp": _CLOUD | {"project_id"},
}
NEEDED = {
    "local": ("head_ip",),
    "aws": ("region",),
    "gcp": ("region", "availability_zone", "project_id"),
}
# What processes of lexshard ask for, and Ray's own; memory in bytes.
RESOURCES = {"CPU", "GPU", "memory", "object_store_memory"}
_OF_CLOUDS = ("available_node_types", "head_node_type", "docker")  # `ray up` starts no others
_OPTION = re.compile(r"--([a-z-]+)(?:=|\s+)(?!--)(\S+)")
_START = re.compile(r"\bray start\b")


class ClusterFileError(ValueError):
    """A file that `ray up` would not start, or not as its author meant it; one line."""


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """``content`` as it was written, ``prepared`` as `ray up` fills it out."""

    path: Path
    provider: str
    content: dict[str, Any]
    prepared: dict[str, Any]


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


def read_cluster_file(path: str | Path) -> ClusterFile:
    """A file that `ray up` takes as it stands; nothing is asked of any cloud.

    Raises:
        ClusterFileError: it cannot be read, has a key that is not known where it stands, or a value
            that Ray refuses.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except OSError as error:
        raise ClusterFileError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ClusterFileError(f"{path} is not valid YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ClusterFileError(f"{path} must hold a mapping, as a file of `ray up` does")
    try:
        prepared = _prepared(content)
    except ClusterFileError as error:
        raise ClusterFileError(f"{path}: {error}") from error
    return ClusterFile(path, content["provider"]["type"], content, prepared)


def _prepared(content: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of it, if every key is known and Ray takes every value."""
    import jsonschema
    import ray.autoscaler
    from ray.autoscaler._private import util

    schema_file = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    schema = json.loads(schema_file.read_text(encoding="utf-8"))
    known = schema["properties"].keys()
    if "provider" not in content:
        _check_keys("at the top", content, known)
        raise ClusterFileError("there is no section 'provider'")
    provider = _checked_provider(content["provider"])
    _check_keys("at the top", content, known - set(_OF_CLOUDS if provider == "local" else ()))
    types = content.get("available_node_types")
    for name, node in types.items() if isinstance(types, dict) else ():
        for key, keys in (("resources", RESOURCES), ("labels", {GPU_MEMORY_LABEL})):
            if isinstance(node, dict) and isinstance(node.get(key), dict):
                _check_keys(f"available_node_types.{name}.{key}", node[key], keys)
    util.logger.setLevel(logging.WARNING)  # it tells which defaults it fills in
    try:
        jsonschema.validate(content, schema)
        prepared: dict[str, Any] = util.prepare_config(content)
        util.validate_config(prepared)
    except jsonschema.ValidationError as error:
        place = ".".join(map(str, error.path)) or "at the top"
        raise ClusterFileError(f"{place}: {_with_guess(error)}") from error
    except KeyError as error:
        raise ClusterFileError(f"provider or a node type says no {error}") from error
    except (ValueError, RuntimeError) as error:
        raise ClusterFileError(str(error)) from error
    return prepared


def _checked_provider(section: Any) -> str:
    """The type of a provider that has what it needs, and nothing unknown."""
    provider = section.get("type") if isinstance(section, dict) else None
    if provider not in list(PROVIDERS):
        raise ClusterFileError(f"provider.type is one of {', '.join(PROVIDERS)}, not {provider!r}")
    _check_keys("provider", section, PROVIDERS[provider])
    missing = [key for key in NEEDED[provider] if not section.get(key)]
    if provider == "local" and not isinstance(section.get("worker_ips"), list):
        missing.append("worker_ips, a list")
    if missing:
        raise ClusterFileError(f"provider has no {', '.join(missing)}")
    return str(provider)


def _check_keys(place: str, section: dict[str, Any], known: Any) -> None:
    for key in section:
        if key not in known:
            raise ClusterFileError(f"{place}: unknown key '{key}'{did_you_mean(str(key), known)}")


def _with_guess(error: Any) -> str:
    """Where Ray's schema knows no such key, with the one that was probably meant."""
    if error.validator != "additionalProperties":
        return str(error.message)
    known = error.schema.get("properties", {})
    [key, *_] = [each for each in error.instance if each not in known]
    return f"unknown key '{key}'{did_you_mean(key, known)}"


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
        node, own = types[name], int(name == head)
        count = (node["min_workers"] + own, node["max_workers"] + own)
        labels = node.get("labels", {})
        yield _group(file, name, count, node["resources"], labels, f"available_node_types.{name}")


def _on_premises(file: ClusterFile) -> Iterator[NodeGroup]:
    workers = len(file.content["provider"]["worker_ips"])
    for name, count in (("head", 1), ("worker", workers)):
        key = f"{name}_start_ray_commands"
        starts = _starts(file, name)
        options: dict[str, str] = dict(_OPTION.findall(starts[0])) if starts else {}
        resources = {}
        for resource, option in (("CPU", "num-cpus"), ("GPU", "num-gpus"), ("memory", "memory")):
            text = options.get(option)
            if text is not None and not text.isdecimal():
                raise ClusterFileError(
                    f"{file.path}: {key}: --{option} is a whole number, not {text!r}"
                )
            if text is not None:
                resources[resource] = int(text)
        labels = dict(each.split("=", 1) for each in options.get("labels", "").split(",") if each)
        if count:
            yield _group(file, name, (count, count), resources, labels, key)


def _starts(file: ClusterFile, name: str) -> list[str]:
    """The commands that start Ray on the head or a worker."""
    commands: Sequence[str] = file.prepared[f"{name}_start_ray_commands"]
    return [each for each in commands if _START.search(each)]


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


def advice(file: ClusterFile) -> Iterator[str]:
    """What Ray allows and is unwise, one sentence for each."""
    for name in ("head", "worker"):
        key = f"{name}_start_ray_commands"
        for command in _starts(file, name):
            if "RAY_AUTH_MODE=token" not in command:
                yield f"{key}: without RAY_AUTH_MODE=token any client of Ray's ports can run code"
            host = dict(_OPTION.findall(command)).get("dashboard-host", "127.0.0.1")
            if host not in ("127.0.0.1", "localhost", "::1"):
                yield (
                    f"{key}: the dashboard listens on {host}: give it 127.0.0.1, and see it with "
                    "`ray dashboard FILE`"
                )
