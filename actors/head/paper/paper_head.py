"""CSV-Decode's online algorithm as an output head, on canonical logits.

It stands where `Shard` stands: the same two steps, the same candidates. It is the paper's own mode,
for comparison and for heads whose clusters are tight enough; with the fallbacks ``full`` and
``partial`` its tokens are those of every other head, bit for bit. Its clusters alone are a shard's
part in CSV-Decode's exchange, and opened in the same rounds (`actors.head.paper.cluster_search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.output_rows import own_rows, refuse_unsound
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.paper.cluster_search import answers, search_clusters
from lexshard.actors.head.paper.clusters import ClusterTokens, OpenedClusters, draws
from lexshard.actors.head.paper.settings import PaperSettings, RowBudget
from lexshard.actors.head.rescoring import Rescorer
from lexshard.actors.states.need import Adjustment, Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.bounds import Clusters, cluster_bounds, remaining_bias
from lexshard.kernels.noise import gumbel_noise, gumbel_row
from lexshard.kernels.rows import postprocess

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PaperScreening(Screening):
    """The bounds of every cluster, and what they leave out."""

    hidden: Float32s  # [N, d]
    upper: Float32s  # [N, C] of raw logits, after post-processing
    scores: Float32s  # [N, C] see `PaperHead.bound`
    first_ids: tuple[Ids, ...]  # [N] tokens of this head that the bounds leave out
    noise: dict[int, Float32s]  # [V] of rows that draw from everything, where all tokens are here


class PaperHead:
    """The output rows of a model in clusters.

    ``weight`` [V, d] fp32 or bf16, ``bias`` [V] or None, ``softcap`` and ``scale`` as for `Shard`;
    ``clusters`` of the first ``vocabulary_size`` rows. ``budget`` is ``K_max``, in rows. ``owned``
    says which tokens the rows are, where they are some clusters of the vocabulary only, of which
    `actors.head.sharded.cluster_step` opens those of all shards; noise is then drawn token by
    token.

    Raises `ValueError` where shapes do not fit and for a scale that is not positive.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        scale: float,
        vocabulary_size: int,
        clusters: Clusters,
        settings: PaperSettings | None = None,
        owned: OwnedRows | None = None,
    ) -> None:
        self.owned = OwnedRows.every(vocabulary_size) if owned is None else owned
        self._size = len(self.owned.ids)
        rows, biases = own_rows(weight, bias, self._size)
        if len(clusters.order) != self._size or clusters.centroid.shape[1] != weight.shape[1]:
            raise ValueError(
                f"clusters of {len(clusters.order)} rows do not fit a vocabulary of "
                f"{self._size}: build the index again"
            )
        if not scale > 0:
            raise ValueError(
                f"a logit scale of {scale} turns bounds around; use another head for this model"
            )
        self.vocabulary_size = vocabulary_size
        self.settings = settings or PaperSettings()
        self.budget = RowBudget(self.settings, self._size)
        self._rescorer = Rescorer(rows, biases, scale, softcap)
        self._clusters = clusters
        owner = np.repeat(np.arange(len(clusters.radius)), clusters.sizes)
        rows_of = clusters.order[np.lexsort((clusters.order, owner))]
        self.tokens = ClusterTokens(self.owned.tokens(rows_of), clusters.offsets)

    # -- screening --------------------------------------------------------------------------------

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        """Bounds of all clusters for ``rows``, whose hidden states are ``hidden`` [N, d] fp32.

        There are no thresholds: none is known before clusters are opened.
        Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        wanted = RowTable.of([self._wanted(rows.need(row)) for row in range(len(rows))])
        return Thresholds(np.full(len(rows), np.nan), wanted, self.bound(hidden, wanted))

    def bound(self, hidden: Hidden, rows: RowTable) -> PaperScreening:
        """Bounds of all clusters for ``rows``; raises as `screen`.

        A cluster's score is the bound of its adjusted logits, and for draws from everything what
        its tempered logits with noise can be at most; ``-inf`` for clusters without rows.
        """
        array = torch.as_tensor(hidden, dtype=torch.float32).detach().numpy()
        if len(rows) != len(array):
            raise ValueError(f"{len(array)} hidden states of {len(rows)} rows")
        refuse_unsound(np.logical_and.reduce(np.isfinite(array), axis=1))
        first = tuple(first_ids(each, self.owned.ids) for each in rows.adjustments)
        upper = self._upper(array, rows, first)
        scores = upper.copy()
        scores[:, self.tokens.sizes == 0] = -np.inf
        noise = {}
        for row in range(len(rows)):
            need = rows.need(row)
            if not draws(need):
                continue
            if self.owned.whole:
                noise[row] = gumbel_row(need.key, need.position, self.vocabulary_size)
                own = noise[row][self.tokens.ids]
            else:
                own = gumbel_noise(need.key, need.position, self.tokens.ids)
            with np.errstate(over="ignore"):
                wide = scores[row].astype(np.float64) * need.inverse_temperature
                scores[row] = _rounded_up(wide + self._largest(own))
        return PaperScreening(
            hidden=array, upper=upper, scores=scores, first_ids=first, noise=noise
        )

    def _largest(self, noise: Float32s) -> Float32s:
        """Of the tokens of each cluster [C]; anything for clusters without rows."""
        largest = np.zeros(len(self.tokens.sizes), np.float32)
        some = self.tokens.sizes > 0
        largest[some] = np.maximum.reduceat(noise, self.tokens.offsets[:-1][some])
        return largest

    def _wanted(self, need: Need) -> Need:
        """The guarantee this head gives to ``need``."""
        epsilon = self.settings.epsilon
        if epsilon is None or not draws(need):
            return need
        return replace(need, kind="epsilon", epsilon=epsilon)

    def _upper(self, hidden: Float32s, rows: RowTable, first: Sequence[Ids]) -> Float32s:
        shape = (len(hidden), len(self._clusters.radius))
        if set(rows.kinds) == {"dense"}:
            return np.full(shape, np.inf, np.float32)
        largest = None
        if self._rescorer.bias is not None:
            largest = np.broadcast_to(self._clusters.bias_values[:, 0], shape).copy()
            for row, ids in enumerate(first):
                if len(ids):
                    largest[row] = remaining_bias(self._clusters, self.owned.rows(ids))
        bounds = cluster_bounds(
            hidden, self._clusters, kind=self.settings.bounds, largest_bias=largest
        )
        scale, softcap = self._rescorer.scale, self._rescorer.softcap
        upper = postprocess(bounds, scale=scale, softcap=softcap)
        if softcap is not None:
            # tanh of a library need not be monotone in its last bit.
            upper = np.nextafter(upper, np.float32(np.inf))
        upper[rows.flat.mask >= 0] = -np.inf
        return upper

    # -- rescoring --------------------------------------------------------------------------------

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """Opens clusters until each row's certificate holds: the tokens known then, with canonical
        logits and a certificate per row."""
        step, asked = thresholds.screening, thresholds.rows
        assert isinstance(step, PaperScreening)
        searches = search_clusters(
            asked,
            step.scores,
            self.tokens.sizes,
            [OpenedClusters(self.tokens, step.scores, step.first_ids)],
            lambda _, rows, ids: [self.logits(step, rows, ids[0])],
            self.budget,
            self.settings,
            step.noise,
        )
        read = self.bound_bytes // len(searches)
        certificates = [
            search.certificate(self.tier, self._size, self.row_bytes, read, float(upper.max()))
            for search, upper in zip(searches, step.upper, strict=True)
        ]
        return answers(searches, certificates, asked)

    def logits(
        self, step: PaperScreening, rows: Sequence[int], tokens: Sequence[Ids]
    ) -> list[Float32s]:
        """Raw canonical logits of each of ``rows``: of some of its own ``tokens``."""
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        ids = self.owned.rows(np.concatenate(tokens))
        raw = self._rescorer.raw(step.hidden[list(rows)], ids, offsets)
        return np.split(raw, offsets[1:-1])

    @property
    def tier(self) -> str:
        """What rows are screened with, in certificates."""
        return f"clusters-{self.settings.bounds}"

    @property
    def row_bytes(self) -> int:
        """What a canonical logit reads."""
        return self._rescorer.row_bytes

    @property
    def bound_bytes(self) -> int:
        """What the bounds of all clusters read."""
        passes = 2 if self.settings.bounds == "best" else 1
        return passes * self._clusters.metadata_bytes


def first_ids(adjustment: Adjustment | None, owned: Ids) -> Ids:
    """Tokens among the sorted ``owned`` that are known before any cluster is opened: those that an
    adjustment may raise, or all that its mask holds."""
    if adjustment is None:
        return np.empty(0, np.int32)
    ids = raised_ids(adjustment) if adjustment.mask is None else adjustment.mask.ids
    return ids[np.isin(ids, owned, assume_unique=True)]


def raised_ids(adjustment: Adjustment) -> Ids:
    """The sorted ids whose logits some processor may raise: no bound on raw logits covers them."""
    raised = [adjustment.bias_ids[adjustment.bias_values > 0]]
    if adjustment.tables is not None and adjustment.table >= 0:
        table = adjustment.tables[adjustment.table]
        if adjustment.repetition < 1:
            raised.append(adjustment.seen_ids())
        elif adjustment.frequency < 0 or adjustment.presence < 0:
            raised.append(np.flatnonzero(table > 1).astype(np.int32))
    return np.unique(np.concatenate(raised)).astype(np.int32)


def _rounded_up(values: npt.NDArray[np.float64]) -> Float32s:
    near = values.astype(np.float32)
    return np.where(near < values, np.nextafter(near, np.float32(np.inf)), near)
