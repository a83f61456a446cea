"""A quantised distribution as bits, and back: which tokens, then how often each counts.

Everything that can be said has a number (the combinatorial number system). K of V tokens there are
C(V, K), counts that sum to l C(l + K - 1, K - 1), and both together are one number, of as many bits
as their product has (Conformal Sparse Quantize-and-Sample, equation 5 and section A.1).
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import lgamma
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FAR = 100  # members: so many products take longer than a binomial


class Lattice(NamedTuple):
    """The distribution ``counts / sum(counts)`` over ``ids``."""

    ids: npt.NDArray[np.int32]  # [K] in order, distinct
    counts: npt.NDArray[np.int64]  # [K] not negative, some above 0

    @property
    def likely(self) -> npt.NDArray[np.int32]:
        """The tokens that can be drawn."""
        return self.ids[self.counts > 0]

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """What `likely` are drawn from and tested by, at both ends: logarithms of counts, fp32."""
        return np.log(self.counts[self.counts > 0].astype(np.float64)).astype(np.float32)


@lru_cache(maxsize=4096)
def lattice_bits(vocabulary_size: int, size: int, resolution: int) -> int:
    """Bits of any distribution over ``size`` tokens, in parts of ``resolution``."""
    ways = math.comb(vocabulary_size, size) * math.comb(resolution + size - 1, size - 1)
    return (ways - 1).bit_length()


def least_bits(vocabulary_size: int, size: int, resolution: int) -> float:
    """A little less than `lattice_bits`, whose binomials may take half a second, in no time."""
    choices = (vocabulary_size, size), (resolution + size - 1, size - 1)
    nats = sum(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) for n, k in choices)
    return nats / math.log(2) * (1 - 1e-9) - 1


def encode(lattice: Lattice, vocabulary_size: int) -> int:
    """The number, below 2 ** `lattice_bits`, that stands for ``lattice``. Raises ValueError for ids
    or counts that no lattice has."""
    ids, counts = lattice.ids.tolist(), lattice.counts.tolist()
    size, resolution = len(ids), sum(counts)
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] >= vocabulary_size:
        raise ValueError(f"ids must be distinct, in order and below {vocabulary_size}")
    if len(counts) != size or min(counts) < 0 or not resolution:
        raise ValueError("there must be a count for each id, none negative, and some above 0")
    # The counts are the gaps between bars among as many stars in a row.
    bars = (np.cumsum(lattice.counts[:-1]) + np.arange(size - 1)).tolist()
    stars_and_bars = resolution + size - 1
    shared = _rank(bars, stars_and_bars)
    return _rank(ids, vocabulary_size) * math.comb(stars_and_bars, size - 1) + shared


def decode(number: int, vocabulary_size: int, size: int, resolution: int) -> Lattice:
    """What `encode` made ``number`` of, without tokens that count 0: of a whole vocabulary in few
    parts nearly all would. Raises ValueError for a number that it cannot have made."""
    if not 1 <= size <= vocabulary_size or resolution < 1 or number < 0:
        raise ValueError(f"no lattice has {size} of {vocabulary_size} tokens")
    stars_and_bars = resolution + size - 1
    place, shared = divmod(number, math.comb(stars_and_bars, size - 1))
    if place >= math.comb(vocabulary_size, size):
        raise ValueError(f"no lattice of {size} of {vocabulary_size} tokens has this number")
    stars = np.array(_subset(shared, min(size - 1, resolution), stars_and_bars), np.int64)
    if size - 1 <= resolution:  # these are the bars
        stars = np.delete(np.arange(stars_and_bars), stars)
    # As many bars stand before a star as tokens before its own.
    places, counts = np.unique(stars - np.arange(resolution), return_counts=True)
    told = min(size, vocabulary_size - size)
    ids = np.array(_subset(place, told, vocabulary_size), np.int64)
    if told < size:  # these are the tokens that are left out
        ids = places + np.searchsorted(ids - np.arange(told), places, side="right")
    else:
        ids = ids[places]
    return Lattice(ids.astype(np.int32), counts)


def _rank(members: list[int], universe: int) -> int:
    """The place of a subset among all of its size in colexicographic order; that of the others,
    where these are fewer."""
    if 2 * len(members) > universe:
        members = np.delete(np.arange(universe), members).tolist()
    return sum(math.comb(member, size) for size, member in enumerate(members, 1))


def _subset(place: int, size: int, universe: int) -> list[int]:
    """The subset of ``size`` members below ``universe``, half of them at most, whose `_rank` is
    ``place``.

    Its largest member is the largest with C(member, size) <= ``place``, and so on with what is
    left. The next binomial is a product away; one of thousands of digits costs milliseconds.
    """
    members: list[int] = []
    member, binomial = universe, math.comb(universe, size)
    for left in range(size, 0, -1):
        if place == 0:
            return [*range(left), *members[::-1]]
        # The geometric mean of a binomial's factors, and how far it lies below the arithmetic one,
        # tell the member to within one or two.
        mean = math.exp((math.log(place) + lgamma(left + 1)) / left)
        likely = max(left, int(mean + (left - 1) / 2 + (left * left - 1) / (24 * mean)))
        if member - likely > FAR:
            member, binomial = likely, math.comb(likely, left)
            while binomial <= place:
                member += 1
                binomial = binomial * member // (member - left)
        while binomial > place:
            binomial = binomial * (member - left) // member
            member -= 1
        members.append(member)
        place -= binomial
        binomial = binomial * left // (member - left + 1)
    return members[::-1]
