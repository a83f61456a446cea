"""Parts of a model folder's weights, read without the rest of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lexshard.actors.stored_tensors import stored_tensors

# As what bits of safetensors' types are read, and what torch calls them.
_TYPES: dict[str, tuple[type[np.unsignedinteger[Any]], torch.dtype]] = {
    "F64": (np.uint64, torch.float64),
    "F32": (np.uint32, torch.float32),
    "BF16": (np.uint16, torch.bfloat16),
    "F16": (np.uint16, torch.float16),
}


class StoredSlices:
    """Rows and columns of the weights in ``folder``, rounded to ``dtype``; see
    `actors.body.parallel.rank.Slices`. What is asked for is copied, and nothing else is kept.

    Raises WeightsError where files are missing or are no safetensors files.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
        self._dtype = dtype

    def __call__(
        self, name: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor | None:
        """None where there is none of that name. Raises ValueError for a file that is too short."""
        stored = self._tensors.get(name)
        if stored is None:
            return None
        bits, kind = _TYPES[stored.dtype]
        mapped = np.memmap(stored.file, bits, "r", stored.start, stored.shape)
        asked = tuple(slice(None) if each is None else _slice(each) for each in (rows, columns))
        part = np.array(mapped[asked[: len(stored.shape)]])
        return torch.from_numpy(part.view(f"i{part.itemsize}")).view(kind).to(self._dtype)


def _slice(places: range) -> slice:
    return slice(places.start, places.stop)
