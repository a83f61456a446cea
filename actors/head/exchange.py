"""What the shards of one head agree on between screening and rescoring, and how answers merge.

Thresholds: the largest holds for all. The whole softmax: every shard bounds its own tokens, all
parts together decide. Candidates: the union, in order of token id. All of it is the same for one
shard, for several in one process and for several on different machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.candidates import Candidates
from actors.head.certificates import merge_certificates
from actors.head.output_head import OutputHead, Thresholds
from actors.head.whole_softmax import Cut, Mass, PartialMass, decide_mass
from actors.states.need import Need

MASS_NEEDS = ("nucleus", "epsilon")
# Computing all canonical logits takes four times as long as a dense screen or more.
HOPELESS_SHARE = 0.75


class MassShard(OutputHead, Protocol):
    """A shard that can say what it knows of the whole softmax."""

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        """The rows that bounds on the whole softmax may decide."""
        ...

    def bound_masses(
        self, thresholds: Thresholds, rows: Sequence[int], *, precisely: bool
    ) -> list[PartialMass | None] | None:
        """Its part of each of ``rows``, None for those that it knows too little of; None alone
        where it does not try."""
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


class MassBounds:
    """One shard's side of agreeing on the whole softmax of ``rows`` of a step.

    The rows that are ``left`` are bounded, once by the low-precision bounds and once, where these
    were too loose, by the dense screen's; then somebody who knows the bounds of all shards decides.
    A row is decided by all shards or by none.
    """

    def __init__(self, shard: MassShard, thresholds: Thresholds, rows: Sequence[int]) -> None:
        self.left = list(rows)
        self._shard = shard
        self._thresholds = thresholds
        self._rows = len(self.left)
        self._bounds: list[PartialMass | None] | None = None
        self._precisely = False
        self._found: dict[int, Mass] = {}

    def bound(self, *, precisely: bool) -> list[PartialMass | None]:
        """This shard's part of each row that is left, None where it knows too little of it."""
        self._precisely = precisely
        self._bounds = self._shard.bound_masses(self._thresholds, self.left, precisely=precisely)
        return [None] * len(self.left) if self._bounds is None else self._bounds

    def settle(self, cuts: Sequence[Cut | None]) -> None:
        """What was decided of the rows that are left; None keeps a row left."""
        bounds = [None] * len(self.left) if self._bounds is None else self._bounds
        for row, part, cut in zip(self.left, bounds, cuts, strict=True):
            if cut is not None:
                assert part is not None  # nothing is decided without all of them
                self._found[row] = Mass(part.ids[cut.keeps(part)], len(part.ids), self._precisely)
        self.left = [row for row, cut in zip(self.left, cuts, strict=True) if cut is None]
        if not self._precisely and self._bounds is not None:
            self._shard.record_bounds(self._thresholds, failed=self._hopeless())

    def masses(self) -> dict[int, Mass]:
        """This shard's tokens of every row that was decided, when all tries have been made."""
        if self._rows:
            self._shard.record_masses(failed=self._hopeless())
        return self._found

    def _hopeless(self) -> bool:
        return len(self.left) > HOPELESS_SHARE * self._rows


def decide_cuts(
    needs: Sequence[Need], bounds: Sequence[Sequence[PartialMass | None]]
) -> list[Cut | None]:
    """What all shards together know of rows [R]: ``bounds`` of every shard, R rows each."""
    cuts: list[Cut | None] = []
    for need, parts in zip(needs, zip(*bounds, strict=True), strict=True):
        known = [part for part in parts if part is not None]
        cuts.append(decide_mass(need, known) if len(known) == len(parts) else None)
    return cuts


def decide_masses(
    shards: Sequence[MassShard], thresholds: Sequence[Thresholds]
) -> tuple[dict[int, Mass], ...]:
    """Per shard, the rows of a step that bounds on the whole softmax decide.

    ``thresholds`` are the shards' own of the same rows.
    """
    common = [set(shard.mass_rows(own)) for shard, own in zip(shards, thresholds, strict=True)]
    rows = sorted(set.intersection(*common))
    sides = [MassBounds(shard, own, rows) for shard, own in zip(shards, thresholds, strict=True)]
    for precisely in (False, True):
        left = sides[0].left
        if not left:
            break
        needs = [thresholds[0].needs[row] for row in left]
        cuts = decide_cuts(needs, [side.bound(precisely=precisely) for side in sides])
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
