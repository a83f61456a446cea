"""Files made from a model's output weights: safetensors of named parts, described in the header.

A part is what one step of a build makes. Its tensors are named ``part.tensor``; its identity is a
digest of everything it was made from, so that a part with the wanted identity need not be made
again. The header carries a digest of itself and of every tensor: a damaged file never screens.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lexshard.actors.index.errors import IndexFileError
from lexshard.actors.index.metadata import (
    CalibrationReport,
    ClusterReport,
    Metadata,
    TierReport,
    Weights,
)

CALIBRATION, CLUSTERS, TIER = "calibration", "clusters", "tier."

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file holds, what makes it, and what is raised where it cannot be used."""

    key: str  # of the header's entry
    noun: str
    command: str
    error: type[ValueError]
    format: int = 1


INDEX = FileKind("lexshard-index", "vocabulary index", "lexshard index build", IndexFileError)


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


def write(
    path: Path, weights: Weights, parts: Mapping[str, Part], kind: FileKind = INDEX
) -> Header:
    """Write a file that appears whole or not at all; the same parts give the same bytes.

    Raises OSError where it cannot be written.
    """
    tensors = {
        f"{name}.{key}": np.ascontiguousarray(array)
        for name, part in parts.items()
        for key, array in part.tensors.items()
    }
    header = Header(
        kind.format,
        weights,
        {
            name: PartHeader(
                part.identity, part.about, {k: digest_of(v) for k, v in part.tensors.items()}
            )
            for name, part in parts.items()
        },
    )
    save(path, tensors, msgspec.to_builtins(header), kind)
    return header


def save(path: Path, tensors: Mapping[str, Array], description: Any, kind: FileKind) -> None:
    """Write tensors and plain data with a ``format``, as `write` does. Raises OSError."""
    text = json.dumps(description)
    # One entry: safetensors writes several in no particular order.
    entry = f"{hashlib.sha256(text.encode()).hexdigest()} {text}"
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    try:
        save_file(dict(tensors), unfinished, metadata={kind.key: entry})
        unfinished.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(unfinished, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_header(path: Path, kind: FileKind = INDEX) -> Header:
    """What the file says about itself, without its tensors.

    Raises the kind's error where there is no file, or not a whole one of this kind and format.
    """
    return msgspec.convert(read_description(path, kind), Header)


def read_description(path: Path, kind: FileKind) -> dict[str, Any]:
    """The plain data that `save` wrote. Raises as `read_header`."""
    with _opened(path, "np", kind) as file:
        description = (file.metadata() or {}).get(kind.key)
    if description is None:
        raise kind.error(f"{path} is not a {kind.noun}: give a file of `{kind.command}`")
    digest, _, text = description.partition(" ")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise _damaged(path, "its header has changed", kind)
    content: dict[str, Any] = json.loads(text)
    if content["format"] != kind.format:
        raise kind.error(
            f"{path} has format {content['format']}, this version reads {kind.format}: make it "
            f"again with `{kind.command}`"
        )
    return content


def check_tiers(path: Path, header: Header, wanted: Collection[str]) -> None:
    """Raises IndexFileError where the index lacks one of ``wanted``."""
    missing = [name for name in wanted if name not in header.tiers]
    if missing:
        raise IndexFileError(
            f"{path} has no tier {', '.join(missing)}, only {', '.join(header.tiers) or 'none'}: "
            f"build it again with --tiers {','.join(dict.fromkeys([*header.tiers, *missing]))}"
        )


def read_part(path: Path, header: Header, name: str, kind: FileKind = INDEX) -> Part:
    """A part with memory-mapped tensors, all of them checked. Raises the kind's error."""
    part = header.parts[name]
    named = {f"{name}.{key}": digest for key, digest in part.digests.items()}
    # Arrays over torch's map; numpy's would be copies.
    tensors = [tensor.numpy() for tensor in read_tensors(path, named, kind, "pt")]
    return Part(part.identity, part.about, dict(zip(part.digests, tensors, strict=True)))


def read_tensors(
    path: Path, digests: Mapping[str, str], kind: FileKind, framework: Literal["np", "pt"]
) -> list[Any]:
    """Tensors of ``framework`` by name, checked by their digests. Raises the kind's error."""
    tensors = []
    with _opened(path, framework, kind) as file:
        for name, digest in digests.items():
            try:
                tensor = file.get_tensor(name)
            except SafetensorError as error:
                raise _damaged(path, str(error), kind) from error
            if digest_of(np.asarray(tensor)) != digest:
                raise _damaged(path, f"the tensor {name} has changed", kind)
            tensors.append(tensor)
    return tensors


def _opened(path: Path, framework: str, kind: FileKind) -> Any:
    if not path.is_file():
        raise kind.error(f"there is no {kind.noun} at {path}: make one with `{kind.command}`")
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error), kind) from error


def _damaged(path: Path, reason: str, kind: FileKind) -> ValueError:
    return kind.error(
        f"{path} is damaged or no {kind.noun} ({reason}): make it again with `{kind.command}`"
    )
