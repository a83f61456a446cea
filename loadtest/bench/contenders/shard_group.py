"""Several shards in one process that answer like one head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.exchange import (
    AnyMassShard,
    decide_masses,
    largest_thresholds,
    merge_candidates,
)
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.owned_rows import check_complete
from lexshard.actors.states.row_table import RowTable


@dataclass(frozen=True, slots=True, eq=False)
class GroupScreening(Screening):
    """What every shard has found."""

    parts: tuple[Thresholds, ...]


class ShardGroup:
    """``shards`` of one head: every token of the vocabulary is a row of exactly one.

    The tokens that can be drawn are the same as from one shard with every row; what finding them
    costs is not. Raises ValueError where tokens are missing or owned twice.
    """

    def __init__(
        self, shards: Sequence[AnyMassShard], owned_ids: Sequence[npt.NDArray[np.int32]]
    ) -> None:
        self.vocabulary_size = shards[0].vocabulary_size
        check_complete(owned_ids, self.vocabulary_size)
        self._shards = tuple(shards)

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        """Thresholds of ``rows`` with hidden states ``hidden`` [N, d] that hold for all shards.

        Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        parts = tuple(shard.screen(hidden, rows) for shard in self._shards)
        tau = largest_thresholds([torch.as_tensor(part.tau).cpu().numpy() for part in parts])
        return Thresholds(tau, rows, GroupScreening(parts))

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """The candidates of all shards, with one certificate per row."""
        assert isinstance(thresholds.screening, GroupScreening)
        parts = thresholds.screening.parts
        masses = decide_masses(self._shards, parts)
        answers = [
            shard.rescore(replace(part, tau=thresholds.tau, masses=own))
            for shard, part, own in zip(self._shards, parts, masses, strict=True)
        ]
        return merge_candidates(answers, self.vocabulary_size)
