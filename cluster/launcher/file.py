"""Reading a file of `ray up`, strictly: what Ray would ignore is an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lexshard.cluster.launcher.schema import PROVIDERS, Schema, strict_schema
from lexshard.cluster.strict_yaml import StrictLoader


class ClusterFileError(ValueError):
    """A file that `ray up` would not start, or not as its author meant it; one line."""


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """``content`` as it was written, ``prepared`` as `ray up` fills it out."""

    path: Path
    provider: str
    content: dict[str, Any]
    prepared: dict[str, Any]


def read_cluster_file(path: str | Path) -> ClusterFile:
    """A file that `ray up` takes as it stands; nothing is asked of any cloud.

    Raises:
        ClusterFileError: it cannot be read, has a key that is not known where it stands, or a value
            that Ray refuses.
    """
    path = Path(path)
    content = _read(path)
    provider = _provider(path, content)
    schema = strict_schema(provider)
    for where, key, known in unknown_keys(content, schema, schema):
        raise ClusterFileError(
            f"{path}: {_place(where)}: unknown key '{key}'{_nearest(key, known)}"
        )
    return ClusterFile(path, provider, content, _prepared(path, content, schema))


def unknown_keys(
    value: Any, schema: Schema, root: Schema, where: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], str, list[str]]]:
    """Where in ``value`` which key is none of those that ``schema`` knows there, and which these
    are. References are to the ``definitions`` of ``root``."""
    if "$ref" in schema:
        schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from unknown_keys(item, schema.get("items", {}), root, (*where, number))
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, inner in value.items():
            if key not in known and others is False:
                yield where, str(key), list(known)
            else:
                below = known.get(key, others if isinstance(others, dict) else {})
                yield from unknown_keys(inner, below, root, (*where, key))


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as stream:
            content = yaml.load(stream, StrictLoader)
    except OSError as error:
        raise ClusterFileError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ClusterFileError(f"{path} is not valid YAML: {reason}") from error
    if not isinstance(content, dict):
        raise ClusterFileError(f"{path} must hold a mapping, as a file of `ray up` does")
    return content


def _provider(path: Path, content: dict[str, Any]) -> str:
    section = content.get("provider")
    if not isinstance(section, dict):
        told = _nearest("provider", list(content)) if "provider" not in content else ""
        raise ClusterFileError(f"{path} has no section 'provider'{told}")
    provider = section.get("type")
    if provider not in PROVIDERS:
        raise ClusterFileError(
            f"{path}: provider.type is one of {', '.join(PROVIDERS)}, not {provider!r}"
        )
    return str(provider)


def _prepared(path: Path, content: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """What `ray up` makes of it, checked by Ray and by ``schema``."""
    import jsonschema
    from ray.autoscaler._private import util

    util.logger.setLevel(logging.WARNING)  # it tells which defaults it fills in
    try:
        jsonschema.validate(content, schema)
        prepared: dict[str, Any] = util.prepare_config(content)
        util.validate_config(prepared)
    except jsonschema.ValidationError as error:
        raise ClusterFileError(f"{path}: {_place(tuple(error.path))}: {error.message}") from error
    except (ValueError, RuntimeError) as error:
        raise ClusterFileError(f"{path}: {error}") from error
    return prepared


def _place(where: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in where) or "at the top"


def _nearest(key: str, known: list[str]) -> str:
    nearest = get_close_matches(key, known, n=1, cutoff=0.6)
    if nearest:
        return f": did you mean {nearest[0]}?"
    return f" (known: {', '.join(sorted(known))})" if known else ""
