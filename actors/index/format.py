"""From an index file to clusters, tiers and calibration that belong to the weights at hand."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lexshard import kernels
from lexshard.actors.index.container import (
    CALIBRATION,
    CLUSTERS,
    TIER,
    Header,
    Part,
    check_tiers,
    read_header,
    read_part,
)
from lexshard.actors.index.errors import IndexFileError, IndexMismatchError
from lexshard.actors.index.metadata import Metadata, Weights
from lexshard.actors.index.tier_tensors import assemble
from lexshard.kernels.bounds import Clusters
from lexshard.kernels.compile_cache import sources_digest
from lexshard.kernels.quantize import Tier

HASHED_ROWS = 8192

_KERNELS = Path(kernels.__file__).parent
# Sources that decide what the numbers of a part mean.
_MAKERS = {CLUSTERS: ("bounds", "clustering"), TIER: ("quantize",)}


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """What screens the output rows of one model.

    ``hidden`` [M, d] fp32 are the calibration's hidden states after the final norm. ``clusters``
    is memory-mapped, tiers are in memory.
    """

    clusters: Clusters | None
    tiers: dict[str, Tier]
    hidden: npt.NDArray[np.float32]
    metadata: Metadata


def describe_weights(weight: torch.Tensor, bias: torch.Tensor | None) -> Weights:
    """Output weights [V, d] fp32 or bf16 and biases [V] fp32 by their hash.

    SHA-256 over types, shapes and bytes, a few thousand rows at a time.
    """
    digest = hashlib.sha256()
    for tensor in (weight, bias):
        if tensor is None:
            continue
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        for rows in tensor.detach().split(HASHED_ROWS):
            digest.update(rows.cpu().contiguous().view(torch.uint8).numpy())
    rows, columns = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return Weights(digest.hexdigest(), rows, columns, dtype, bias is not None)


@functools.cache
def code_of(part: str) -> str:
    """A name for the sources that make this part: numbers of others might mean something else."""
    makers = _MAKERS[TIER if part.startswith(TIER) else part]
    return " ".join(sources_digest(_KERNELS / maker) for maker in makers)


def read_index(path: Path, weights: Weights, tiers: Collection[str] | None = None) -> Index:
    """The index at ``path``, checked against what `describe_weights` says of the output weights.

    Rows beyond the tokenizer's vocabulary must have been cut off. ``tiers`` names those to load;
    None is all. Raises IndexMismatchError where the file was built from other weights, and
    IndexFileError where it is missing, damaged, lacks a tier or was made by other code.
    """
    header = read_header(path)
    check_weights(path, header, weights)
    metadata = header.metadata()
    wanted = header.tiers if tiers is None else tuple(tiers)
    check_tiers(path, header, wanted)
    clusters = None
    if CLUSTERS in header.parts:
        clusters = Clusters(**_read(path, header, CLUSTERS).tensors)
    loaded = {}
    for name in wanted:
        part = _read(path, header, TIER + name)
        loaded[name] = assemble(part.about["tier"], part.tensors)
    hidden = np.array(read_part(path, header, CALIBRATION).tensors["hidden"])
    return Index(clusters, loaded, hidden, metadata)


def _read(path: Path, header: Header, name: str) -> Part:
    if header.parts[name].about.get("code") != code_of(name):
        raise IndexFileError(
            f"{path} was made by another version of lexshard: build it again with "
            f"`lexshard index build MODEL --out {path}`"
        )
    return read_part(path, header, name)


def check_weights(path: Path, header: Header, weights: Weights) -> None:
    """Raises IndexMismatchError naming both hashes."""
    if header.weights != weights:
        raise IndexMismatchError(
            f"{path} was built from output weights {_named(header.weights)}, but the model has "
            f"{_named(weights)}: build it again with `lexshard index build MODEL --out {path}`, "
            "or name the index of this model"
        )


def _named(weights: Weights) -> str:
    return f"{weights.hash} ({weights.rows:,} x {weights.columns:,} {weights.dtype})"
