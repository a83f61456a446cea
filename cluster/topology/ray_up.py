"""Files of `ray up`: what may stand in them.

Ray validates a file by its own schema, which is open where a provider or a node's resources stand:
a misspelt key there costs a cluster that starts with less than it was told. Here it is closed. What
goes to a cloud's API (``node_config``) is left to that, which refuses what it does not know.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import yaml

from lexshard.cluster.nearest import did_you_mean
from lexshard.cluster.strict_yaml import NOT_YAML, StrictLoader

# What each provider must be told, and may be; as node providers and their bootstrapping read it.
PROVIDERS = {
    "local": (("head_ip", "worker_ips"), ("external_head_ip",)),
    "aws": (("region",), ("availability_zone", "cache_stopped_nodes", "security_group")),
    "gcp": (("region", "availability_zone", "project_id"), ("cache_stopped_nodes",)),
}
_ANY_PROVIDER = ("type", "use_internal_ips", "disable_node_updaters")
# What processes of lexshard ask for, and Ray's own; memory in bytes.
RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
_OF_CLOUDS = ("available_node_types", "head_node_type", "docker")  # `ray up` starts no others


class ClusterFileError(ValueError):
    """A file that `ray up` would not start, or not as its author meant it; one line."""


def check_cluster_file(path: str | Path) -> str:
    """The type of provider of a file that `ray up` takes as it stands; asks no cloud.

    Raises:
        ClusterFileError: it cannot be read, has a key that is not known where it stands, or a value
            that Ray refuses.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except OSError as error:
        raise ClusterFileError(f"cannot read {path}: {error.strerror}") from error
    except NOT_YAML as error:
        reason = " ".join(str(error).split())
        raise ClusterFileError(f"{path} is not valid YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ClusterFileError(f"{path} must hold a mapping, as a file of `ray up` does")
    complaint = _complaint(content)
    if complaint is not None:
        raise ClusterFileError(f"{path}: {complaint}")
    return str(content["provider"]["type"])


def _complaint(content: dict[str, Any]) -> str | None:
    """What is wrong with the content of a file; None where Ray takes it."""
    import ray.autoscaler
    from jsonschema.validators import validator_for
    from ray.autoscaler._private import util

    schema = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())
    if "provider" in content:
        section = content["provider"]
        provider = section.get("type") if isinstance(section, dict) else None
        if provider not in list(PROVIDERS):
            return f"provider.type is one of {', '.join(PROVIDERS)}, not {provider!r}"
        _close(schema["properties"], provider)
    errors = list(validator_for(schema)(schema).iter_errors(content))
    if errors:  # a misspelt key tells more than that another one is missing
        return _told(min(errors, key=lambda error: bool(error.validator != _UNKNOWN)))
    util.logger.setLevel(logging.WARNING)  # it tells which defaults it fills in
    try:
        util.validate_config(util.prepare_config(content))
    except KeyError as error:
        return f"provider or a node type says no {error}"
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


_UNKNOWN = "additionalProperties"  # the schema's word for keys that it does not list


def _close(properties: dict[str, Any], provider: str) -> None:
    """Closes Ray's schema where it takes anything, for a file with that ``provider``."""
    needed, optional = PROVIDERS[provider]
    section = properties["provider"]
    keys = (*_ANY_PROVIDER, *needed, *optional)
    known = {key: section["properties"].get(key, {}) for key in keys}
    section |= {"properties": known, "required": list(needed), _UNKNOWN: False}
    node = properties["available_node_types"]["patternProperties"][".*"]["properties"]
    amount = node["resources"].pop("patternProperties")[".*"]
    node["resources"] |= {"properties": dict.fromkeys(RESOURCES, amount), _UNKNOWN: False}
    for key in _OF_CLOUDS if provider == "local" else ():
        del properties[key]


def _told(error: Any) -> str:
    """An error of a schema; of a key that it does not know, with the one that was probably
    meant."""
    place = ".".join(map(str, error.path)) or "at the top"
    known = error.schema.get("properties", {})
    if error.validator == "required":
        missing = [key for key in error.validator_value if key not in error.instance]
        return f"{place} has no {', '.join(missing)}"
    if error.validator != _UNKNOWN:
        return f"{place}: {error.message}"
    [key, *_] = [each for each in error.instance if each not in known]
    return f"{place}: unknown key '{key}'{did_you_mean(str(key), known)}"
