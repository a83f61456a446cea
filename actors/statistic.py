"""What ``EngineStatistics`` says of each of its fields, where it declares it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_KEY = "statistic"


@dataclass(frozen=True, slots=True)
class Statistic:
    """``gauge``: a state that comes and goes; anything else only ever grows. ``label`` is what a
    mapping counts by; None for a single number. With ``bounds`` it is a histogram by ``label``:
    how many observations were at most each bound and above the one before, how many beyond the
    last, and the sum of all."""

    description: str
    gauge: bool
    label: str | None
    bounds: tuple[float, ...] = ()


def counter(description: str, label: str | None = None) -> dict[str, Statistic]:
    """The metadata of a field that only grows."""
    return {_KEY: Statistic(description, gauge=False, label=label)}


def gauge(description: str) -> dict[str, Statistic]:
    """The metadata of a field that tells a state."""
    return {_KEY: Statistic(description, gauge=True, label=None)}


def histogram(description: str, label: str, bounds: tuple[float, ...]) -> dict[str, Statistic]:
    """The metadata of a field that counts how often values were observed."""
    return {_KEY: Statistic(description, gauge=False, label=label, bounds=bounds)}


def statistics_of(message: type[Any]) -> dict[str, Statistic]:
    """Every field of ``message``, by name and in order. Raises KeyError for one not described."""
    return {field.name: field.metadata[_KEY] for field in fields(message)}
