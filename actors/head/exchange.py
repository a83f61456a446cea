"""What the shards of one head agree on between screening and rescoring, and how answers merge.

Thresholds: the largest holds for all. The whole softmax: every shard bounds its own tokens, all
parts together decide. Candidates: the union, in order of token id. All of it is the same for one
shard, for several in one process and for several on different machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.certificates import merge_certificates
from lexshard.actors.head.output_head import OutputHead, Thresholds
from lexshard.actors.head.softmax.whole_softmax import (
    Cut,
    Mass,
    PartialMass,
    decide_mass,
    plan_mass,
)
from lexshard.actors.messages import NUCLEUS_NEEDS
from lexshard.actors.states.need import Need
from lexshard.kernels.masks import LOW_SIX, ONE, SIX
from lexshard.kernels.mass import Outline

MASS_NEEDS = (*NUCLEUS_NEEDS, "epsilon")
# Computing all canonical logits takes four times as long as a dense screen or more.
HOPELESS_SHARE = 0.75


class MassTries(NamedTuple):
    """How a shard, or all together, would bound the masses of a step: by the bounds that screened
    it, and by more precise ones."""

    at_once: bool
    precisely: bool


class AnyMassShard(OutputHead, Protocol):
    """A shard that may know something of the whole softmax. ``asks_others`` says whether the
    thresholds of other shards leave it less to compute: else it has nothing to exchange before its
    candidates."""

    asks_others: bool

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        """The rows that bounds on the whole softmax may decide: those of a `MassShard` alone."""
        ...


class MassShard(AnyMassShard, Protocol):
    """A shard that can say what it knows of the whole softmax."""

    def mass_tries(self, thresholds: Thresholds) -> MassTries:
        """Whether the bounds that screened the step are worth a try now, and whether there are
        more precise ones. Asked once per step."""
        ...

    def outline_masses(
        self, thresholds: Thresholds, rows: Sequence[int], *, precisely: bool
    ) -> list[Outline | None]:
        """Where its tokens lie in each of ``rows``; None for those that it knows too little of.

        ``precisely`` asks for the best bounds it has, which may be those that screened the step."""
        ...

    def bound_masses(self, thresholds: Thresholds, lowest: Mapping[int, int]) -> list[PartialMass]:
        """Its part of rows that it has outlined last: by row, the lowest bin to know exactly."""
        ...

    def record_bounds(self, thresholds: Thresholds, *, failed: bool) -> None:
        """How the first try, not precise, went with the rows of a step."""
        ...

    def record_masses(self, *, failed: bool) -> None:
        """How all tries together went."""
        ...


def largest_thresholds(
    thresholds: Sequence[npt.NDArray[np.float64]],
) -> npt.NDArray[np.float64]:
    """The thresholds [N] of all shards: a row has one where any shard has."""
    return np.fmax.reduce(np.stack(thresholds), axis=0)


def plan_masses(
    needs: Sequence[Need], outlines: Sequence[Sequence[Outline | None]], vocabulary_size: int
) -> list[int | None]:
    """The lowest bin to know exactly of rows [R]: ``outlines`` of every shard, R rows each."""
    rows = zip(*outlines, strict=True)
    return [
        plan_mass(need, parts, vocabulary_size) for need, parts in zip(needs, rows, strict=True)
    ]


def decide_cuts(needs: Sequence[Need], bounds: Sequence[Sequence[PartialMass]]) -> list[Cut | None]:
    """What all shards together know of rows [R]: ``bounds`` of every shard, R rows each."""
    rows = zip(*bounds, strict=True)
    return [decide_mass(need, parts) for need, parts in zip(needs, rows, strict=True)]


def agree_on_masses(
    shards: Sequence[MassShard],
    thresholds: Sequence[Thresholds],
    rows: Sequence[int],
    tries: MassTries,
    plan: Callable[[Sequence[Need], Sequence[Sequence[Outline | None]]], list[int | None]],
    decide: Callable[[Sequence[Need], Sequence[Sequence[PartialMass]]], list[Cut | None]],
) -> list[dict[int, Mass]]:
    """Per shard of this process, its tokens of those of ``rows`` of a step, at least one, that
    bounds decide.

    ``plan`` and ``decide`` hear what these shards say and add what others do (`plan_masses`,
    `decide_cuts`). First the low-precision bounds are tried, and where these were too loose the
    dense screen's. A row is decided by all shards or by none.
    """
    pairs = list(zip(shards, thresholds, strict=True))
    left = list(rows)
    found: list[dict[int, Mass]] = [{} for _ in shards]
    for precisely, worth in zip((False, True), tries, strict=True):
        if not worth or not left:
            continue
        needs = [thresholds[0].rows.need(row) for row in left]
        plans = plan(needs, [s.outline_masses(own, left, precisely=precisely) for s, own in pairs])
        lowest = {row: each for row, each in zip(left, plans, strict=True) if each is not None}
        bounds = [shard.bound_masses(own, lowest) for shard, own in pairs]
        planned = [need for row, need in zip(left, needs, strict=True) if row in lowest]
        cuts = decide(planned, bounds) if planned else []
        for place, (row, cut) in enumerate(zip(lowest, cuts, strict=True)):
            if cut is not None:
                for masses, parts in zip(found, bounds, strict=True):
                    part = parts[place]
                    masses[row] = Mass(part.ids[cut.keeps(part)], len(part.ids), precisely)
        left = [row for row in left if row not in found[0]]
        if not precisely:
            for shard, own in pairs:
                shard.record_bounds(own, failed=len(left) > HOPELESS_SHARE * len(rows))
    for shard in shards:
        shard.record_masses(failed=len(left) > HOPELESS_SHARE * len(rows))
    return found


def decide_masses(
    shards: Sequence[AnyMassShard], thresholds: Sequence[Thresholds]
) -> list[dict[int, Mass]]:
    """Per shard, the rows of a step that bounds on the whole softmax decide, where all shards are
    here. ``thresholds`` are the shards' own of the same rows.

    Bounds are tried where every shard would, more precise ones where any shard has them.
    """
    asked = zip(shards, thresholds, strict=True)
    rows = sorted(set.intersection(*(set(shard.mass_rows(own)) for shard, own in asked)))
    if not rows:
        return [{} for _ in shards]
    bounding = cast(Sequence[MassShard], shards)
    tries = [shard.mass_tries(own) for shard, own in zip(bounding, thresholds, strict=True)]
    agreed = MassTries(all(t.at_once for t in tries), any(t.precisely for t in tries))
    plan = partial(plan_masses, vocabulary_size=shards[0].vocabulary_size)
    return agree_on_masses(bounding, thresholds, rows, agreed, plan, decide_cuts)


def merge_candidates(parts: Sequence[Candidates], vocabulary_size: int) -> Candidates:
    """The candidates of the same rows from shards that make up the vocabulary."""
    if len(parts) == 1:
        return parts[0]
    rows, adjustments = len(parts[0].certificates), parts[0].adjustments
    row_of = np.concatenate([np.repeat(np.arange(rows), np.diff(part.offsets)) for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    order = np.lexsort((ids, row_of))
    counts = np.bincount(row_of, minlength=rows)
    if adjustments is not None and len(adjustments.masks):
        # A shard may give all of its tokens where another gives few; of such rows no sampler hears
        # the mask, which it hears of rows with every token alone.
        own, tokens = adjustments.mask[row_of], ids.astype(np.uint64)
        allowed = (adjustments.masks[own, tokens >> SIX] >> (tokens & LOW_SIX)) & ONE == ONE
        kept = allowed | (own < 0) | (counts[row_of] == vocabulary_size)
        order = order[kept[order]]
        counts = np.bincount(row_of[order], minlength=rows)
    return Candidates(
        ids=ids[order],
        raw=np.concatenate([part.raw for part in parts])[order],
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        certificates=tuple(
            merge_certificates([part.certificates[row] for part in parts], vocabulary_size)
            for row in range(rows)
        ),
        adjustments=adjustments,
    )
