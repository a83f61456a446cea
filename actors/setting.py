"""How a setting of ``EngineConfiguration`` is told, where it declares it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_KEY = "setting"


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """What a file, the environment, a command line and a banner must know of a setting.

    ``group`` is what it stands with wherever all are listed. ``key``, ``flag`` and ``metavar`` are
    their words where its name does not give them; ``least`` is its smallest value. ``in_bytes``: it
    may be given with a unit.
    """

    description: str
    group: str
    metavar: str | None = None
    key: str | None = None
    flag: str | None = None
    least: int | None = None
    in_bytes: bool = False


def setting(description: str, *, group: str, **words: Any) -> dict[str, EngineSetting]:
    """The metadata of a field; ``group`` and ``words`` are those of
    `EngineSetting`."""
    return {_KEY: EngineSetting(description, group, **words)}


def settings_of(configuration: type[Any]) -> dict[str, EngineSetting]:
    """The fields of ``configuration`` that can be told, by name and in order."""
    return {
        item.name: item.metadata[_KEY] for item in fields(configuration) if _KEY in item.metadata
    }
