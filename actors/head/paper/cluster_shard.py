"""A shard in CSV-Decode's exchange: bounds of its clusters, then the logits of those chosen.

The other side, which chooses, is `actors.head.sharded.cluster_step`. Both know which tokens a
cluster has and which were asked for, so that logits travel without ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.head.output_head import Hidden
from lexshard.actors.head.paper.paper_head import PaperHead, PaperScreening
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable

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


class ClusterShard:
    """The clusters of ``head``, whose rows are some tokens of the vocabulary."""

    def __init__(self, head: PaperHead) -> None:
        self.head = head
        self.vocabulary_size = head.vocabulary_size
        rows, offsets = head.cluster_rows
        self.tokens = ClusterTokens(head.owned.tokens(rows), offsets)

    def bound(self, hidden: Hidden, asked: RowTable) -> tuple[PaperScreening, Float32s]:
        """What is known before clusters are opened, and the scores [N, C] of the rows of ``hidden``
        [N, d]: the bound of each cluster's adjusted logits, and for draws from everything what its
        tempered logits with noise can be at most.

        Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        screening = self.head.bounds(hidden, asked)
        scores = screening.upper.copy()
        scores[:, self.tokens.sizes == 0] = -np.inf
        for row in range(len(asked)):
            need = asked.need(row)
            if draws(need):
                largest = self._largest_noise(need)
                with np.errstate(over="ignore"):
                    wide = scores[row].astype(np.float64) * need.inverse_temperature + largest
                    scores[row] = _rounded_up(wide)
        return screening, scores

    def logits(self, screening: PaperScreening, row: int, tokens: Ids) -> Float32s:
        """Raw canonical logits [I] of some of its ``tokens`` in one row."""
        hidden = screening.hidden[row : row + 1]
        return self.head.logits(hidden, self.head.owned.rows(tokens))

    def _largest_noise(self, need: Need) -> npt.NDArray[np.float64]:
        """[C]; anything for clusters without rows."""
        rows, offsets = self.head.cluster_rows
        noise = self.head.noise(need.key, need.position)[rows]
        largest = np.zeros(len(offsets) - 1)
        some = self.tokens.sizes > 0
        largest[some] = np.maximum.reduceat(noise, offsets[:-1][some])
        return largest


def draws(need: Need) -> bool:
    """Whether it is a draw from the whole vocabulary."""
    return need.kind == "top1" and need.inverse_temperature > 0


def _rounded_up(values: npt.NDArray[np.float64]) -> Float32s:
    near = values.astype(np.float32)
    return np.where(near < values, np.nextafter(near, np.float32(np.inf)), near)
