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
from actors.head.whole_softmax import Mass, PartialMass, decide_mass

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


def decide_masses(
    shards: Sequence[MassShard], thresholds: Sequence[Thresholds]
) -> tuple[dict[int, Mass], ...]:
    """Per shard, the rows of a step that bounds on the whole softmax decide.

    ``thresholds`` are the shards' own of the same rows. Where the low-precision bounds are too
    loose, the dense screens' are tried. A row is decided by all shards or by none.
    """
    found: tuple[dict[int, Mass], ...] = tuple({} for _ in shards)
    common = [set(shard.mass_rows(own)) for shard, own in zip(shards, thresholds, strict=True)]
    rows = sorted(set.intersection(*common))
    left = rows
    for precisely in (False, True):
        if not left:
            break
        bounded = [
            shard.bound_masses(own, left, precisely=precisely)
            for shard, own in zip(shards, thresholds, strict=True)
        ]
        undecided = []
        for place, row in enumerate(left):
            parts = [own[place] for own in bounded if own is not None]
            known = [part for part in parts if part is not None]
            if len(known) < len(shards):
                undecided.append(row)
                continue
            kept = decide_mass(thresholds[0].needs[row], known)
            if kept is None:
                undecided.append(row)
                continue
            for own, part in zip(found, known, strict=True):
                ids = kept if len(shards) == 1 else part.ids[np.isin(part.ids, kept)]
                own[row] = Mass(ids, len(part.ids), precisely)
        left = undecided
        if not precisely:
            failed = len(left) > HOPELESS_SHARE * len(rows)
            for shard, own_bounds, own_thresholds in zip(shards, bounded, thresholds, strict=True):
                if own_bounds is not None:
                    shard.record_bounds(own_thresholds, failed=failed)
    if rows:
        for shard in shards:
            shard.record_masses(failed=len(left) > HOPELESS_SHARE * len(rows))
    return found


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
