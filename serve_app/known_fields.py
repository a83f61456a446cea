"""Fields that nothing knows: refused by name, unless they are null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticCustomError

from lexshard.cluster.nearest import did_you_mean

UNKNOWN_FIELD: Final = "unknown_field"  # the type of the error


def known_fields(body: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what is unknown and null. One that is not ends the matter: a million of them would
    each become an error."""
    if body.keys() <= fields.keys():
        return body
    for name, value in body.items():
        if name not in fields and value is not None:
            near = did_you_mean(name, fields)
            raise PydanticCustomError(UNKNOWN_FIELD, "{name}", {"name": name, "near": near})
    return {name: value for name, value in body.items() if name in fields}
