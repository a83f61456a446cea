"""A quantised distribution as bits, and back: which tokens, then how often each counts.

Everything that can be said has a number (the combinatorial number system). K of V tokens there are
C(V, K), counts that sum to l C(l + K - 1, K - 1), and both together are one number, of as many bits
as their product has (Conformal Sparse Quantize-and-Sample, equation 5 and section A.1). Where K
varies it goes before that, in ``log2 V`` bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Literal

import numpy as np

from lexshard.kernels.lattice import cpu, reference
from lexshard.kernels.lattice.types import Lattice

Implementation = Literal["reference", "cpu"]


def size_bits(vocabulary_size: int) -> int:
    """Bits that tell how many tokens are kept, 1 to all."""
    return (vocabulary_size - 1).bit_length()


@lru_cache(maxsize=4096)
def lattice_bits(vocabulary_size: int, size: int, resolution: int) -> int:
    """Bits of any distribution over ``size`` tokens, in parts of ``resolution``."""
    ways = math.comb(vocabulary_size, size) * ways_to_share(resolution, size)
    return (ways - 1).bit_length()


def least_bits(vocabulary_size: int, size: int, resolution: int) -> float:
    """A little less than `lattice_bits`, in no time: binomials of half a vocabulary take
    half a second."""
    chosen = (vocabulary_size, size), (resolution + size - 1, size - 1)
    nats = sum(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for n, k in chosen)
    return nats / math.log(2) * (1 - 1e-9) - 1


@lru_cache(maxsize=4096)
def ways_to_share(resolution: int, size: int) -> int:
    """How many ``size`` counts from 0 on sum to ``resolution``."""
    return math.comb(resolution + size - 1, min(resolution, size - 1))


def encode(lattice: Lattice, vocabulary_size: int) -> int:
    """The number, below 2 ** `lattice_bits`, that stands for ``lattice``.

    Raises ValueError for ids or counts that no lattice has.
    """
    ids, counts = lattice.ids.tolist(), lattice.counts.tolist()
    size, resolution = len(ids), sum(counts)
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] >= vocabulary_size:
        raise ValueError(f"ids must be distinct, in order and below {vocabulary_size}")
    if len(counts) != size or min(counts) < 0 or not resolution:
        raise ValueError("there must be a count for each id, none negative, and some above 0")
    members = _fewer(ids, vocabulary_size)
    place = reference.rank(members) * ways_to_share(resolution, size)
    return place + _counts_rank(counts, resolution)


def decode(
    number: int,
    vocabulary_size: int,
    size: int,
    resolution: int,
    *,
    implementation: Implementation | None = None,
) -> Lattice:
    """The lattice that `encode` made ``number`` of. Raises ValueError for a number that it cannot
    have made."""
    coder = reference if implementation == "reference" else cpu
    if not 1 <= size <= vocabulary_size or resolution < 1 or number < 0:
        raise ValueError(f"no lattice has {size} of {vocabulary_size} tokens")
    place, counts_place = divmod(number, ways_to_share(resolution, size))
    if place >= math.comb(vocabulary_size, size):
        raise ValueError(f"no lattice of {size} of {vocabulary_size} tokens has this number")
    ids = _members(coder, place, size, vocabulary_size)
    counts = _counts(coder, counts_place, size, resolution)
    return Lattice(np.array(ids, np.int32), np.array(counts, np.int64))


def _fewer(members: list[int], universe: int) -> list[int]:
    """What is told of a subset: its members or the others, whichever are fewer."""
    return _others(members, universe) if 2 * len(members) > universe else members


def _members(coder: ModuleType, place: int, size: int, universe: int) -> list[int]:
    """The subset of ``size`` whose fewer were told."""
    whole = 2 * size > universe
    told: list[int] = coder.subset(place, universe - size if whole else size, universe)
    return _others(told, universe) if whole else told


def _others(members: Sequence[int], universe: int) -> list[int]:
    told = set(members)
    return [member for member in range(universe) if member not in told]


def _counts_rank(counts: Sequence[int], resolution: int) -> int:
    """The counts are the gaps between bars among ``resolution`` stars in a row."""
    bars = np.cumsum(np.asarray(counts[:-1], np.int64)) + np.arange(len(counts) - 1)
    return reference.rank(_fewer(bars.tolist(), resolution + len(counts) - 1))


def _counts(coder: ModuleType, place: int, size: int, resolution: int) -> list[int]:
    universe = resolution + size - 1
    bars = _members(coder, place, size - 1, universe)
    gaps: list[int] = (np.diff(np.array([-1, *bars, universe], np.int64)) - 1).tolist()
    return gaps
