"""Does an index belong to the model in a folder? Told from files, without loading the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.actors.index.container import Header, read_header
from lexshard.actors.index.errors import IndexMismatchError
from lexshard.actors.index.metadata import Weights
from lexshard.actors.stored_tensors import StoredTensor, stored_tensors

_NUMBERS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def check_index_of(path: Path, folder: Path) -> Header:
    """Whether the index at ``path`` was built from the output weights in ``folder``; its header.

    Raises IndexMismatchError where no tensor of the model has the hash that
    `actors.index.format.describe_weights` gave, IndexFileError where the file is no index and
    WeightsError where the model has no readable weights.
    """
    header = read_header(path)
    wanted = header.weights
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
    for tensor in tensors.values():
        if _might_be(tensor, wanted):
            bias = tensors.get(tensor.name.removesuffix("weight") + "bias")
            if any(found == wanted.hash for found in _hashes(tensor, bias, wanted)):
                return header
    raise IndexMismatchError(
        f"{path} was built from output weights {wanted.hash} ({wanted.rows:,} x "
        f"{wanted.columns:,} {wanted.dtype}), which the model in {folder} does not have: build it "
        f"again with `lexshard index build {folder} --out {path}`, or name the index of this model"
    )


def _might_be(tensor: StoredTensor, wanted: Weights) -> bool:
    return (
        tensor.dtype in _NUMBERS
        and len(tensor.shape) == 2
        and tensor.shape[0] >= wanted.rows
        and tensor.shape[1] == wanted.columns
    )


def _hashes(tensor: StoredTensor, bias: StoredTensor | None, wanted: Weights) -> Iterator[str]:
    """What `describe_weights` says of the tensor, in the forms in which a model may be loaded."""
    weight = _read(tensor, wanted.rows)
    half = wanted.dtype == "bfloat16"
    named = f"torch.{wanted.dtype} {(wanted.rows, wanted.columns)}".encode()
    digest = hashlib.sha256(named)
    digest.update((_as_bfloat16(weight) if half else _as_float32(weight)).data)
    if not wanted.bias:
        yield digest.hexdigest()
    elif bias is not None:
        values = _read(bias, wanted.rows)
        exact = _as_float32(values)
        rounded = _as_float32(_as_bfloat16(values))  # of a model that was loaded in bfloat16
        for form in (exact, rounded):
            whole = digest.copy()
            whole.update(f"torch.float32 {(wanted.rows,)}".encode())
            whole.update(form.data)
            yield whole.hexdigest()


def _read(tensor: StoredTensor, rows: int) -> npt.NDArray[Any]:
    """The first ``rows`` of a tensor, mapped; bfloat16 as its bits."""
    kind = _NUMBERS[tensor.dtype]
    return np.memmap(tensor.file, kind, "r", offset=tensor.start, shape=tensor.shape)[:rows]


def _as_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def _as_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Bits rounded to nearest, ties to even."""
    if values.dtype == np.uint16:
        return np.ascontiguousarray(values)
    bits = _as_float32(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
