"""Tiers as named tensors and plain data, and back: every frozen dataclass of arrays, numbers, None
and such dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.quantize import tiers
from lexshard.kernels.quantize.layout import aligned

Array = npt.NDArray[Any]

_CLASSES: dict[str, type[Any]] = {
    name: value
    for name, value in vars(tiers).items()
    if isinstance(value, type) and is_dataclass(value)
}


def disassemble(value: Any, name: str = "") -> tuple[Any, dict[str, Array]]:
    """Plain data that describes ``value``, and its arrays by dotted name."""
    if isinstance(value, np.ndarray):
        return {"array": name}, {name: value}
    if isinstance(value, np.generic):
        return {"value": value.item()}, {}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}, {}
    if type(value).__name__ not in _CLASSES:
        raise TypeError(f"{type(value).__name__} in a tier: only kernels.quantize's dataclasses")
    described, arrays = {}, {}
    for field in fields(value):
        child = f"{name}.{field.name}" if name else field.name
        described[field.name], found = disassemble(getattr(value, field.name), child)
        arrays.update(found)
    return {"class": type(value).__name__, "fields": described}, arrays


def assemble(description: Any, arrays: Mapping[str, Array]) -> Any:
    """What `disassemble` took apart, its arrays copied to the start of a cache line."""
    if "array" in description:
        return _copied(arrays[description["array"]])
    if "value" in description:
        return description["value"]
    children = {key: assemble(child, arrays) for key, child in description["fields"].items()}
    return _CLASSES[description["class"]](**children)


def _copied(array: Array) -> Array:
    """A copy in ordinary memory, from the start of a cache line: screens read it faster than a
    mapped file."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy
