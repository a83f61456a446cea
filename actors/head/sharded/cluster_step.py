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

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Collective
from lexshard.actors.head.output_head import Hidden
from lexshard.actors.head.paper.cluster_search import answers, search_clusters
from lexshard.actors.head.paper.clusters import ClusterTokens, OpenedClusters
from lexshard.actors.head.paper.paper_head import PaperHead, PaperScreening, first_ids
from lexshard.actors.head.paper.settings import RowBudget
from lexshard.actors.states.row_table import RowTable

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


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

    def take(self, hidden: Hidden, rows: RowTable) -> Candidates | None:
        """The candidates of all shards at the root, None elsewhere."""
        own = self._shard.bound(hidden, rows)
        if self._collective.rank != ROOT:
            self._collective.gather(own.scores.tobytes())
            self._serve(own)
            return None
        parts = self._collective.gather(b"")[1:]
        others = [np.frombuffer(part, np.float32).reshape(len(rows), -1) for part in parts]
        return self._lead(own, [own.scores, *others], rows)

    def _serve(self, own: PaperScreening) -> None:
        """What becomes known of this shard, as the root says what to open."""
        opened = OpenedClusters(self._tokens[0], own.scores, own.first_ids)
        while message := self._collective.broadcast():
            cuts = np.frombuffer(message, np.float32).tolist()
            rows = [row for row, cut in enumerate(cuts) if not math.isnan(cut)]
            ids = [opened.open(row, cuts[row]) for row in rows]
            self._collective.gather(np.concatenate(self._shard.logits(own, rows, ids)).tobytes())

    def _lead(self, own: PaperScreening, scores: Sequence[Float32s], rows: RowTable) -> Candidates:
        head = self._shard

        def ask(
            cuts: Float32s, left: Sequence[int], ids: Sequence[Sequence[Ids]]
        ) -> list[list[Float32s]]:
            self._collective.broadcast(cuts.tobytes())
            here = head.logits(own, left, ids[0])
            found = [np.frombuffer(each, np.float32) for each in self._collective.gather(b"")[1:]]
            ends = [np.cumsum(list(map(len, theirs)))[:-1] for theirs in ids[1:]]
            return [here, *map(np.split, found, ends)]

        opened = [
            OpenedClusters(tokens, own_scores, [first_ids(each, ids) for each in rows.adjustments])
            for tokens, own_scores, ids in zip(self._tokens, scores, self._owned, strict=True)
        ]
        every = np.concatenate(scores, axis=1)
        searches = search_clusters(
            rows, every, self._sizes, opened, ask, self._budget, head.settings
        )
        self._collective.broadcast(b"")
        clusters = len(self._tokens[0].sizes) * len(searches)
        read = len(self._sizes) * head.bound_bytes // clusters
        certificates = [
            search.certificate(head.tier, head.vocabulary_size, head.row_bytes, read)
            for search in searches
        ]
        return answers(searches, certificates, rows)
