"""The index file: safetensors whose tensors belong to named parts, described in the header.

A part is what one step of a build makes. Its tensors are named ``part.tensor``; its identity is a
digest of everything it was made from, so that a part with the wanted identity need not be made
again. The header carries a digest of itself and of every tensor: a damaged file never screens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from actors.index.errors import IndexFileError
from actors.index.metadata import CalibrationReport, ClusterReport, Metadata, TierReport, Weights

FORMAT = 1
KEY = "lexshard-index"
CALIBRATION, CLUSTERS, TIER = "calibration", "clusters", "tier."

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PartHeader:
    """``about`` is plain JSON data; ``digests`` are by tensor."""

    identity: str
    about: dict[str, Any]
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Header:
    format: int
    weights: Weights
    parts: dict[str, PartHeader]

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers in the file."""
        return tuple(part.removeprefix(TIER) for part in self.parts if part.startswith(TIER))

    def metadata(self) -> Metadata:
        """The reports of all parts. Raises IndexFileError for a part that is only a piece."""

        def report(name: str, kind: type) -> Any:
            return msgspec.convert(self.parts[name].about["report"], kind)

        if CALIBRATION not in self.parts:
            raise IndexFileError("this is one part of an unfinished index: finish the build")
        return Metadata(
            weights=self.weights,
            calibration=report(CALIBRATION, CalibrationReport),
            clusters=report(CLUSTERS, ClusterReport) if CLUSTERS in self.parts else None,
            tiers={name: report(TIER + name, TierReport) for name in self.tiers},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    identity: str
    about: dict[str, Any]
    tensors: dict[str, Array]


def digest_of(array: Array) -> str:
    """SHA-256 over type, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write(path: Path, weights: Weights, parts: Mapping[str, Part]) -> Header:
    """Write a file that appears whole or not at all; the same parts give the same bytes.

    Raises OSError where it cannot be written.
    """
    tensors = {
        f"{name}.{key}": np.ascontiguousarray(array)
        for name, part in parts.items()
        for key, array in part.tensors.items()
    }
    header = Header(
        FORMAT,
        weights,
        {
            name: PartHeader(
                part.identity, part.about, {k: digest_of(v) for k, v in part.tensors.items()}
            )
            for name, part in parts.items()
        },
    )
    text = json.dumps(msgspec.to_builtins(header))
    # One entry: safetensors writes several in no particular order.
    description = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    try:
        save_file(tensors, unfinished, metadata={KEY: description})
        unfinished.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(unfinished, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return header


def read_header(path: Path) -> Header:
    """What the file says about itself, without its tensors.

    Raises IndexFileError where there is no file, or not a whole index of this format.
    """
    with _opened(path, "np") as file:
        description = (file.metadata() or {}).get(KEY)
    if description is None:
        raise IndexFileError(f"{path} is not a vocabulary index: give a file that lexshard built")
    digest, _, text = description.partition(" ")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise _damaged(path, "its header has changed")
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise IndexFileError(
            f"{path} has format {content['format']}, this version reads {FORMAT}: build it again"
        )
    return msgspec.convert(content, Header)


def read_part(path: Path, header: Header, name: str) -> Part:
    """A part with memory-mapped tensors, all of them checked. Raises IndexFileError."""
    part = header.parts[name]
    tensors = {}
    with _opened(path, "pt") as file:  # arrays over torch's map; safetensors' numpy would copy
        for key, digest in part.digests.items():
            try:
                tensors[key] = file.get_tensor(f"{name}.{key}").numpy()
            except SafetensorError as error:
                raise _damaged(path, str(error)) from error
            if digest_of(tensors[key]) != digest:
                raise _damaged(path, f"the tensor {name}.{key} has changed")
    return Part(part.identity, part.about, tensors)


def _opened(path: Path, framework: str) -> Any:
    if not path.is_file():
        raise IndexFileError(f"there is no index at {path}: build one with `lexshard index build`")
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> IndexFileError:
    return IndexFileError(
        f"{path} is damaged or no index ({reason}): build it again with `lexshard index build`"
    )
