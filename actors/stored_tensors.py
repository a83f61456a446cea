"""What the safetensors files of a model folder hold, from their headers alone."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from lexshard.actors.body.errors import WeightsError

# What models that also see call their text's weights, and models of text alone.
TEXT_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# Of a draft model (`actors.drafter.router`). Not *.safetensors, though it is one: servers that load
# every such file of a folder would try.
ROUTER_FILE = "draft-router.tensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored: bytes ``start`` to ``stop`` of ``file``. ``name`` is that in models
    of text alone (`TEXT_NAMES`), ``dtype`` safetensors' (F32, BF16, F16, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of the model in ``folder``, file by file.

    Raises WeightsError where files are missing or are no safetensors files.
    """
    return [tensor for name in _file_names(folder) for tensor in _tensors_of(folder / name)]


def _file_names(folder: Path) -> list[str]:
    # As transformers does, whose weights a body is compared with: an index may be left over.
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} lists no weights: download the model again") from error
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
    raise WeightsError(
        f"{folder} has no {SINGLE_FILE}"
        + (
            ": pickled weights can run code and are not read; save the model with "
            "safe_serialization=True"
            if pickled
            else ": the download may be incomplete"
        )
    )


def _tensors_of(file: Path) -> list[StoredTensor]:
    if not file.is_file():
        raise WeightsError(f"{file} is missing: download the model again")
    with file.open("rb") as stream:
        try:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = dict(json.loads(stream.read(length)))
        except (struct.error, ValueError, TypeError, MemoryError, OverflowError) as error:
            raise WeightsError(
                f"{file} is not a safetensors file: download the model again"
            ) from error
    header.pop("__metadata__", None)
    begin = 8 + length
    return [
        StoredTensor(
            _text_name(name),
            about["dtype"],
            tuple(about["shape"]),
            file,
            *(begin + offset for offset in about["data_offsets"]),
        )
        for name, about in header.items()
    ]


def _text_name(name: str) -> str:
    prefix = next(filter(name.startswith, TEXT_NAMES), "")
    return TEXT_NAMES.get(prefix, "") + name.removeprefix(prefix)
