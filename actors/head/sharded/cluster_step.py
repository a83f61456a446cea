"""One step of CSV-Decode across shards, as every process takes it: the paper's multi-GPU workflow.

    gather            the scores of every shard's clusters: 4 bytes each per row
    broadcast         per row, the score from which on clusters are opened: the best of all shards
    gather            the logits of what that opens: 4 bytes each
    ...               until the certificate of every row holds, or its budget is spent

The paper sends all bounds to all processes, and each chooses the same clusters. Here the root
chooses, and tells a number per row; it checks the certificates in any case. Which tokens a cluster
has is said once, when a group is formed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Collective
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.paper.cluster_search import ClusterSearch
from lexshard.actors.head.paper.clusters import ClusterTokens, OpenedClusters
from lexshard.actors.head.paper.paper_head import PaperHead, PaperScreening, first_ids
from lexshard.actors.head.paper.settings import RowBudget
from lexshard.actors.head.sharded.step import AgreedScreening
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.penalties import select_row

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterScreening(Screening):
    """What this shard has bounded; ``all_scores`` are those of every shard, at the root alone."""

    own: PaperScreening
    all_scores: tuple[Float32s, ...] = ()


class ClusterStep:
    """The steps of ``shard``, which is one of those that ``collective`` joins.

    ``tokens`` are the clusters of every shard in order of rank, at the root; elsewhere its own.
    Rows whose certificate does not hold within the budget take the fallback of the head's settings.
    """

    def __init__(
        self, shard: PaperHead, tokens: Sequence[ClusterTokens], collective: Collective
    ) -> None:
        self._shard = shard
        self._tokens = tuple(tokens)
        self._collective = collective
        self._sizes = np.concatenate([each.sizes for each in self._tokens])
        self._owned = [np.sort(each.ids) for each in self._tokens]
        self._budget = RowBudget(shard.settings, shard.vocabulary_size)

    def screen(self, hidden: Hidden, rows: RowTable) -> AgreedScreening:
        """Bounds of all clusters, at the root."""
        own = self._shard.bound(hidden, rows)
        scores = own.scores
        parts = self._collective.gather(b"" if self._collective.rank == ROOT else scores.tobytes())
        others = [np.frombuffer(part, np.float32).reshape(len(rows), -1) for part in parts[1:]]
        screening = ClusterScreening(own, (scores, *others) if parts else ())
        return AgreedScreening(Thresholds(np.full(len(rows), np.nan), rows, screening))

    def rescore(self, agreed: AgreedScreening) -> Candidates | None:
        """The candidates of all shards at the root, None elsewhere."""
        screening = agreed.thresholds.screening
        assert isinstance(screening, ClusterScreening)
        if self._collective.rank != ROOT:
            self._serve(screening)
            return None
        rows = agreed.thresholds.rows
        searches = self._search(screening, rows)
        self._budget.adapt([each.spent for each in searches if each.need.kind != "dense"])
        return self._candidates(rows, searches)

    # -- the side of every shard ------------------------------------------------------------------

    def _serve(self, screening: ClusterScreening) -> None:
        opened = OpenedClusters(self._tokens[0], screening.own.scores, self._first(screening))
        while cuts := self._collective.broadcast():
            logits = self._logits(screening, opened, np.frombuffer(cuts, np.float32))
            self._collective.gather(np.concatenate(logits).tobytes())

    def _logits(
        self, screening: ClusterScreening, opened: OpenedClusters, cuts: Float32s
    ) -> list[Float32s]:
        """What every row newly knows of this shard."""
        rows = [row for row, cut in enumerate(cuts.tolist()) if not math.isnan(cut)]
        ids = [opened.open(row, float(cuts[row])) for row in rows]
        return self._shard.logits(screening.own, rows, ids)

    def _first(self, screening: ClusterScreening) -> list[npt.NDArray[np.int32]]:
        owned = self._shard.owned
        return [owned.tokens(rows) for rows in screening.own.first_ids]

    # -- the side of the root ---------------------------------------------------------------------

    def _search(self, screening: ClusterScreening, rows: RowTable) -> list[ClusterSearch]:
        every = np.concatenate(screening.all_scores, axis=1)
        searches = [
            ClusterSearch(
                need,
                select_row(rows.flat, row),
                every[row],
                self._sizes,
                self._budget.of(need.position),
                self._shard.settings,
            )
            for row, need in enumerate(map(rows.need, range(len(rows))))
        ]
        opened = [
            OpenedClusters(tokens, scores, [first_ids(each, owned) for each in rows.adjustments])
            for tokens, scores, owned in zip(
                self._tokens, screening.all_scores, self._owned, strict=True
            )
        ]
        while True:
            cuts = np.array([search.cut() for search in searches], np.float32)
            if np.isnan(cuts).all():
                self._collective.broadcast(b"")
                return searches
            self._collective.broadcast(cuts.tobytes())
            self._learn(screening, searches, opened, cuts)

    def _learn(
        self,
        screening: ClusterScreening,
        searches: Sequence[ClusterSearch],
        opened: Sequence[OpenedClusters],
        cuts: Float32s,
    ) -> None:
        rows = [row for row, cut in enumerate(cuts.tolist()) if not math.isnan(cut)]
        ids = [[each.open(row, float(cuts[row])) for row in rows] for each in opened]
        own = self._shard.logits(screening.own, rows, ids[0])
        answers = [
            np.split(
                np.frombuffer(part, np.float32), np.cumsum([len(each) for each in theirs])[:-1]
            )
            for part, theirs in zip(self._collective.gather(b"")[1:], ids[1:], strict=True)
        ]
        found = [own, *answers]
        for place, row in enumerate(rows):
            searches[row].learn(
                float(cuts[row]),
                np.concatenate([theirs[place] for theirs in ids]),
                np.concatenate([theirs[place] for theirs in found]),
            )

    def _candidates(self, rows: RowTable, searches: Sequence[ClusterSearch]) -> Candidates:
        head, size = self._shard, self._shard.vocabulary_size
        answers = [search.answer() for search in searches]
        own = len(self._tokens[0].sizes)
        read = len(self._sizes) * head.bound_bytes // (own * len(searches))
        tier = f"clusters-{head.settings.bounds}"
        return Candidates(
            ids=np.concatenate([ids for ids, _ in answers]),
            raw=np.concatenate([raw for _, raw in answers]),
            offsets=np.cumsum([0, *(len(ids) for ids, _ in answers)], dtype=np.int64),
            certificates=tuple(
                search.certificate(tier, size, head.row_bytes, read) for search in searches
            ),
            adjustments=rows.flat,
        )
