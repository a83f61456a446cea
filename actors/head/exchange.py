"""What the shards of one head agree on between screening and rescoring, and how answers merge.

Thresholds: the largest holds for all. The whole softmax: every shard bounds its own tokens, all
parts together decide. Candidates: the union, in order of token id. All of it is the same for one
shard, for several in one process and for several on different machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.certificates import merge_certificates
from lexshard.actors.head.output_head import OutputHead, Thresholds
from lexshard.actors.head.whole_softmax import Cut, Mass, PartialMass, decide_mass, plan_mass
from lexshard.actors.states.need import Need
from lexshard.kernels.mass import Outline

MASS_NEEDS = ("nucleus", "epsilon")
# Computing all canonical logits takes four times as long as a dense screen or more.
HOPELESS_SHARE = 0.75


class MassTries(NamedTuple):
    """How a shard, or all together, would bound the masses of a step: by the bounds that screened
    it, and by more precise ones."""

    at_once: bool
    precisely: bool


class MassShard(OutputHead, Protocol):
    """A shard that can say what it knows of the whole softmax."""

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        """The rows that bounds on the whole softmax may decide."""
        ...

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


def agreed_tries(tries: Sequence[MassTries]) -> MassTries:
    """Bounds are tried where every shard would, more precise ones where any shard has them."""
    return MassTries(all(each.at_once for each in tries), any(each.precisely for each in tries))


class MassBounds:
    """One shard's side of agreeing on the whole softmax of ``rows`` of a step.

    A try of the rows that are ``left`` takes three calls, and a root that hears all shards in
    between: `outline`, from which it plans (`plan_masses`); `bound`, from which it decides
    (`decide_cuts`); and `settle`. First the low-precision bounds are tried, and where these were
    too loose the dense screen's. A row is decided by all shards or by none.
    """

    def __init__(self, shard: MassShard, thresholds: Thresholds, rows: Sequence[int]) -> None:
        self.left = list(rows)
        self._shard = shard
        self._thresholds = thresholds
        self._rows = len(self.left)
        self._precisely = False
        self._parts: dict[int, PartialMass] = {}
        self._found: dict[int, Mass] = {}

    def outline(self, *, precisely: bool) -> list[Outline | None]:
        """Where this shard's tokens lie in each row that is left."""
        self._precisely = precisely
        return self._shard.outline_masses(self._thresholds, self.left, precisely=precisely)

    def bound(self, plans: Sequence[int | None]) -> list[PartialMass]:
        """This shard's part of each row that is left and has a plan."""
        lowest = {row: plan for row, plan in zip(self.left, plans, strict=True) if plan is not None}
        parts = self._shard.bound_masses(self._thresholds, lowest)
        self._parts = dict(zip(lowest, parts, strict=True))
        return parts

    def settle(self, cuts: Sequence[Cut | None]) -> None:
        """What was decided of the rows that had a plan; None keeps a row left."""
        for (row, part), cut in zip(self._parts.items(), cuts, strict=True):
            if cut is not None:
                self._found[row] = Mass(part.ids[cut.keeps(part)], len(part.ids), self._precisely)
        self.left = [row for row in self.left if row not in self._found]
        if not self._precisely:
            self._shard.record_bounds(self._thresholds, failed=self._hopeless())

    def masses(self) -> dict[int, Mass]:
        """This shard's tokens of every row that was decided, when all tries have been made."""
        if self._rows:
            self._shard.record_masses(failed=self._hopeless())
        return self._found

    def _hopeless(self) -> bool:
        return len(self.left) > HOPELESS_SHARE * self._rows


def plan_masses(
    needs: Sequence[Need], outlines: Sequence[Sequence[Outline | None]], vocabulary_size: int
) -> list[int | None]:
    """The lowest bin to know exactly of rows [R]: ``outlines`` of every shard, R rows each."""
    rows = zip(*outlines, strict=True)
    return [
        plan_mass(need, parts, vocabulary_size) for need, parts in zip(needs, rows, strict=True)
    ]


def planned(needs: Sequence[Need], plans: Sequence[int | None]) -> list[Need]:
    """Those of ``needs`` that have a plan."""
    return [need for need, plan in zip(needs, plans, strict=True) if plan is not None]


def decide_cuts(needs: Sequence[Need], bounds: Sequence[Sequence[PartialMass]]) -> list[Cut | None]:
    """What all shards together know of rows [R]: ``bounds`` of every shard, R rows each."""
    rows = zip(*bounds, strict=True)
    return [decide_mass(need, parts) for need, parts in zip(needs, rows, strict=True)]


def decide_masses(
    shards: Sequence[MassShard], thresholds: Sequence[Thresholds]
) -> tuple[dict[int, Mass], ...]:
    """Per shard, the rows of a step that bounds on the whole softmax decide.

    ``thresholds`` are the shards' own of the same rows.
    """
    pairs = list(zip(shards, thresholds, strict=True))
    common = [set(shard.mass_rows(own)) for shard, own in pairs]
    rows = sorted(set.intersection(*common))
    sides = [MassBounds(shard, own, rows) for shard, own in pairs]
    if rows:
        tries = agreed_tries([shard.mass_tries(own) for shard, own in pairs])
        for precisely, worth in zip((False, True), tries, strict=True):
            left = sides[0].left
            if not worth or not left:
                continue
            needs = [thresholds[0].rows.need(row) for row in left]
            outlines = [side.outline(precisely=precisely) for side in sides]
            plans = plan_masses(needs, outlines, shards[0].vocabulary_size)
            bounds = [side.bound(plans) for side in sides]
            cuts = decide_cuts(planned(needs, plans), bounds)
            for side in sides:
                side.settle(cuts)
    return tuple(side.masses() for side in sides)


def merge_candidates(parts: Sequence[Candidates], vocabulary_size: int) -> Candidates:
    """The candidates of the same rows from shards that make up the vocabulary."""
    if len(parts) == 1:
        return parts[0]
    rows = len(parts[0].certificates)
    row_of = np.concatenate([np.repeat(np.arange(rows), np.diff(part.offsets)) for part in parts])
    ids = np.concatenate([part.ids for part in parts])
    order = np.lexsort((ids, row_of))
    counts = np.sum([np.diff(part.offsets) for part in parts], axis=0)
    return Candidates(
        ids=ids[order],
        raw=np.concatenate([part.raw for part in parts])[order],
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        certificates=tuple(
            merge_certificates([part.certificates[row] for part in parts], vocabulary_size)
            for row in range(rows)
        ),
        adjustments=parts[0].adjustments,
    )
