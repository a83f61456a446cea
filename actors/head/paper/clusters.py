"""Which tokens clusters have, and which of them are open, as both sides of an exchange know it:
so logits travel without ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.states.need import Need

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterTokens:
    """Cluster ``c`` of a shard has the tokens ``ids[offsets[c]:offsets[c + 1]]``."""

    ids: Ids  # [n] of the vocabulary
    offsets: npt.NDArray[np.int64]  # [C + 1]

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens per cluster [C]."""
        return np.diff(self.offsets)


class OpenedClusters:
    """Which clusters of a shard are open in the rows of a step, by their ``scores`` [N, C].

    ``first`` [N] are tokens of the shard that are known before any cluster is opened.
    """

    def __init__(self, tokens: ClusterTokens, scores: Float32s, first: Sequence[Ids]) -> None:
        self._tokens = tokens
        self._scores = scores
        self._first = first
        self._begun = np.zeros(len(scores), np.bool_)
        self.opened = np.zeros(scores.shape, np.bool_)  # [N, C]

    def open(self, row: int, cut: float) -> Ids:
        """The tokens that become known, in the order in which their logits travel, as ``row`` opens
        every cluster whose score is at least ``cut``."""
        new = (self._scores[row] >= cut) & ~self.opened[row]
        self.opened[row] |= new
        offsets, first = self._tokens.offsets, self._first[row]
        members = [
            self._tokens.ids[offsets[cluster] : offsets[cluster + 1]]
            for cluster in np.flatnonzero(new).tolist()
        ]
        ids = np.concatenate([np.empty(0, np.int32), *members])
        ids = ids[~np.isin(ids, first)]
        if self._begun[row]:
            return ids
        self._begun[row] = True
        return np.concatenate([first, ids])


def draws(need: Need) -> bool:
    """Whether it is a draw from the whole vocabulary."""
    return need.kind == "top1" and need.inverse_temperature > 0
