"""Guarantees about the whole softmax from a part of it: top-p sets and epsilon.

The best tokens are computed exactly, the mass of all others is bounded from both sides by the
screen. How many those best are is planned from the estimates of all shards (`kernels.mass.outline`,
`plan_mass`): a shard by itself cannot know how little its tokens matter. Where no plan promises a
certificate at less than the dense way costs, none is tried. Every shard bounds its own tokens
(`bound_mass`); all of them together decide (`decide_mass`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.states.need import Need
from lexshard.kernels.certify import epsilon_certificate, nucleus_certificate
from lexshard.kernels.mass import Outline, outside_mass, plan
from lexshard.kernels.mass.reference import MASS_MARGIN
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import TOP_K, Estimates, Needs, find_leaders
from lexshard.kernels.truncate import best_ids

# Beyond this share of the vocabulary the dense way is as cheap.
LARGEST_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class PartialMass:
    """What one shard knows of one row's softmax: some tokens exactly, bounds on all others."""

    ids: npt.NDArray[np.int32]  # [K] sorted, of the vocabulary
    logits: npt.NDArray[np.float32]  # [K] canonical, after adjustment
    log_upper: float  # of the tempered mass of the shard's other tokens
    log_lower: float
    largest: float  # upper bound of any other logit
    outside_count: int  # how many they are


@dataclass(frozen=True, slots=True, eq=False)
class Mass:
    """The tokens of one shard in the set that holds the wanted mass, and what it took.

    ``precise`` says that the bounds were the dense screen's.
    """

    ids: npt.NDArray[np.int32]  # sorted
    rescored: int
    precise: bool


class Cut(NamedTuple):
    """Where the set that holds the wanted mass ends: its worst token, which is still in it.

    Tokens are in order of adjusted logit, ties in order of id. It is all that shards must be told.
    """

    logit: float
    token_id: int

    def keeps(self, part: PartialMass) -> npt.NDArray[np.bool_]:
        """Which tokens that ``part`` knows exactly [K] are in the set."""
        logits = part.logits
        tied = (logits == self.logit) & (part.ids <= self.token_id)
        return np.asarray((logits > self.logit) | tied)


EVERYTHING = Cut(-math.inf, np.iinfo(np.int32).max)


SoftmaxRow = tuple[Estimates, Needs, Adjustments]  # of one row
Exact = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]


class OutlinedRow(NamedTuple):
    """A row of the whole softmax between its outline and its bounds."""

    row: SoftmaxRow
    outline: Outline | None


def plan_mass(need: Need, outlines: Sequence[Outline | None], vocabulary_size: int) -> int | None:
    """From which bin on the tokens of a row are to be known exactly, from the outlines of all
    shards; None where that promises no certificate at less than the dense way costs."""
    known = [each for each in outlines if each is not None]
    if len(known) < len(outlines):
        return None
    lowest, count = plan(known, need.top_p, need.epsilon if need.kind == "epsilon" else 0.0)
    return lowest if count <= LARGEST_SHARE * vocabulary_size else None


def bound_mass(row: SoftmaxRow, owned: OwnedRows, count: int, exact: Exact) -> PartialMass:
    """A shard's part of one row: the ``count`` best of its tokens by their estimates exactly,
    as ``exact`` computes the adjusted logits of its rows, and bounds on all others."""
    estimates, needs, adjustments = row
    size = len(owned.ids)
    ids, offsets = np.empty(0, np.int32), np.zeros(2, np.int64)
    if count:  # none of its tokens may matter
        wanted = needs._replace(kind=np.array([TOP_K]), k=np.array([count]))
        leaders = find_leaders(estimates, size, wanted, adjustments)
        ids, offsets = leaders.ids, leaders.offsets
    outside = outside_mass(estimates, size, needs, adjustments, ids, offsets)
    upper, lower, largest = (float(each[0]) for each in outside)
    return PartialMass(owned.tokens(ids), exact(ids), upper, lower, largest, size - len(ids))


def decide_mass(need: Need, parts: Sequence[PartialMass]) -> Cut | None:
    """Which of the tokens known exactly ``need`` is about; None where the bounds are too loose to
    tell.

    The parts are of disjoint sets of tokens that make up the vocabulary.
    """
    ids, logits = parts[0].ids, parts[0].logits
    upper, lower, largest = parts[0].log_upper, parts[0].log_lower, parts[0].largest
    if len(parts) > 1:
        ids = np.concatenate([part.ids for part in parts])
        order = np.argsort(ids)
        ids, logits = ids[order], np.concatenate([part.logits for part in parts])[order]
        # The margins stay above the roundings of these sums.
        upper = float(np.logaddexp.reduce([part.log_upper for part in parts])) + MASS_MARGIN
        lower = float(np.logaddexp.reduce([part.log_lower for part in parts])) - MASS_MARGIN
        largest = max(part.largest for part in parts)
    if need.kind == "epsilon":
        certain = epsilon_certificate(logits, need.inverse_temperature, need.epsilon, upper)
        return EVERYTHING if certain else None
    kept = nucleus_certificate(
        logits,
        need.inverse_temperature,
        need.top_p,
        upper,
        lower,
        largest,
        outside_count=sum(part.outside_count for part in parts),
    )
    if kept <= 0:
        return None
    worst = best_ids(logits, kept)[-1]
    return Cut(float(logits[worst]), int(ids[worst]))
