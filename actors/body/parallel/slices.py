"""Parts of a model folder's weights, read without the rest of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.stored_tensors import stored_tensors

# Some rows and some columns of a weight by its name, None: all; None where there is none of it.
Slices = Callable[[str, range | None, range | None], torch.Tensor | None]

# As what bits of safetensors' types are read, and what torch calls them.
_TYPES: dict[str, tuple[type[np.unsignedinteger[Any]], torch.dtype]] = {
    "F64": (np.uint64, torch.float64),
    "F32": (np.uint32, torch.float32),
    "BF16": (np.uint16, torch.bfloat16),
    "F16": (np.uint16, torch.float16),
}


class StoredSlices:
    """Rows and columns of the weights in ``folder``, rounded to ``dtype``; see
    `Slices`. What is asked for is copied, and nothing else is kept.

    Raises WeightsError where files are missing or are no safetensors files.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
        self.names = frozenset(self._tensors)
        self._dtype = dtype

    def __call__(
        self,
        name: str,
        rows: range | npt.NDArray[np.int32] | None = None,
        columns: range | None = None,
    ) -> torch.Tensor | None:
        """None where there is none of that name; ``rows`` may be any. Raises ValueError for a file
        that is too short."""
        stored = self._tensors.get(name)
        if stored is None:
            return None
        bits, kind = _TYPES[stored.dtype]
        mapped = np.memmap(stored.file, bits, "r", stored.start, stored.shape)
        asked = tuple(slice(None) if each is None else _slice(each) for each in (rows, columns))
        part = np.array(mapped[asked[: len(stored.shape)]])
        return torch.from_numpy(part.view(f"i{part.itemsize}")).view(kind).to(self._dtype)


def there(
    name: str, slices: Slices, rows: range | None = None, columns: range | None = None
) -> torch.Tensor:
    """Of a weight that there must be. Raises KeyError where there is none."""
    found = slices(name, rows, columns)
    if found is None:
        raise KeyError(name)
    return found


def slices_of(model: Any) -> Slices:
    """Rows and columns of the weights of a transformers model."""
    weights = model.state_dict()

    def part(name: str, rows: range | None, columns: range | None) -> torch.Tensor | None:
        found: torch.Tensor | None = weights.get(name)
        if found is None:
            return None
        if rows is not None:
            found = found[rows.start : rows.stop]
        return found if columns is None else found[:, columns.start : columns.stop]

    return part


def _slice(places: range | npt.NDArray[np.int32]) -> slice | npt.NDArray[np.int32]:
    return slice(places.start, places.stop) if isinstance(places, range) else places
