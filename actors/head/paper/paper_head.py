"""CSV-Decode's online algorithm as an output head, on canonical logits.

It stands where `Shard` stands: the same two steps, the same candidates. It is the paper's own mode,
for comparison and for heads whose clusters are tight enough; with the fallbacks ``full`` and
``partial`` its tokens are those of every other head, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.output_rows import log_normalizers, own_rows, refuse_unsound
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.paper.settings import PaperSettings, next_budget
from lexshard.actors.messages import Certificate, Guarantee
from lexshard.actors.states.need import Adjustment, Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels import opening as openings
from lexshard.kernels.bounds import Clusters, cluster_bounds, remaining_bias
from lexshard.kernels.certify import (
    coverage_log_odds,
    known_log_mass,
    log_odds,
    nucleus_certificate,
    within_odds,
)
from lexshard.kernels.noise import gumbel_noise, gumbel_row
from lexshard.kernels.opening import CERTIFIED, EXAMINE, Goal, Head, Opening
from lexshard.kernels.penalties import Adjustments, adjust, select_row
from lexshard.kernels.rows import canonical_logits, postprocess
from lexshard.kernels.truncate import best_ids

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

UNLIMITED = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class PaperScreening(Screening):
    """The bounds of every cluster, and what they leave out."""

    hidden: Float32s  # [N, d]
    adjustments: Adjustments  # of the head's own rows
    upper: Float32s  # [N, C] of raw logits, after post-processing
    first_ids: tuple[Ids, ...]  # [N] tokens that the bounds leave out


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """How the opening of one row ended. ``ids`` None: every logit is needed."""

    ids: Ids | None
    guarantee: Guarantee
    opening: Opening | None
    spent: bool


class PaperHead:
    """The output rows of a model in clusters.

    ``weight`` [V, d] fp32 or bf16, ``bias`` [V] or None, ``softcap`` and ``scale`` as for `Shard`;
    ``clusters`` of the first ``vocabulary_size`` rows. ``budget`` is ``K_max``, in rows. ``owned``
    says which tokens the rows are, where they are some clusters of the vocabulary only; noise is
    then drawn token by token, and what needs the whole softmax gets every logit.

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
        rows, self._bias = own_rows(weight, bias, self._size)
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
        self.budget = self.settings.budget_share * self._size
        self._weight = rows
        self._softcap = softcap
        self._scale = scale
        self._clusters = clusters
        self._ids = np.arange(self._size, dtype=np.int32)
        owner = np.repeat(np.arange(len(clusters.radius)), clusters.sizes)
        self._head = Head(
            weight=(rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy(),
            bias=np.empty(0, np.float32) if self._bias is None else self._bias,
            scale=np.float32(scale),
            softcap=softcap or 0.0,
            order=clusters.order[np.lexsort((clusters.order, owner))],
            offsets=clusters.offsets,
        )

    # -- screening --------------------------------------------------------------------------------

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        """Bounds of all clusters for ``rows``, whose hidden states are ``hidden`` [N, d] fp32.

        There are no thresholds: none is known before clusters are opened.
        Raises `NonFiniteHiddenError` naming the rows that contain NaN or infinity.
        """
        wanted = RowTable.of([self._wanted(rows.need(row)) for row in range(len(rows))])
        return Thresholds(np.full(len(rows), np.nan), wanted, self.bounds(hidden, wanted))

    def bounds(self, hidden: Hidden, rows: RowTable) -> PaperScreening:
        """Bounds of all clusters for ``rows``; raises as `screen`."""
        array = torch.as_tensor(hidden, dtype=torch.float32).detach().numpy()
        if len(rows) != len(array):
            raise ValueError(f"{len(array)} hidden states of {len(rows)} rows")
        refuse_unsound(np.logical_and.reduce(np.isfinite(array), axis=1))
        first = tuple(map(self._first_ids, rows.adjustments))
        return PaperScreening(
            hidden=array,
            adjustments=self.owned.of_rows(rows.flat),
            upper=self._upper(array, rows, first),
            first_ids=first,
        )

    def _wanted(self, need: Need) -> Need:
        """The guarantee this head gives to ``need``; some rows alone know no whole softmax."""
        if not self.owned.whole and need.kind in ("nucleus", "epsilon"):
            return replace(need, kind="dense")
        epsilon = self.settings.epsilon if self.owned.whole else None
        if epsilon is None or need.kind != "top1" or not need.inverse_temperature:
            return need
        return replace(need, kind="epsilon", epsilon=epsilon)

    def _first_ids(self, adjustment: Adjustment | None) -> Ids:
        """Tokens to know first: those that an adjustment may raise, or all that are allowed."""
        if adjustment is None:
            return np.empty(0, np.int32)
        ids = raised_ids(adjustment) if adjustment.allowed is None else adjustment.allowed
        own = np.isin(ids, self.owned.ids, assume_unique=True)
        return self.owned.rows(ids[own])

    def _upper(self, hidden: Float32s, rows: RowTable, first: Sequence[Ids]) -> Float32s:
        shape = (len(hidden), len(self._clusters.radius))
        if set(rows.kinds) == {"dense"}:
            return np.full(shape, np.inf, np.float32)
        largest = None
        if self._bias is not None:
            largest = np.broadcast_to(self._clusters.bias_values[:, 0], shape).copy()
            for row, ids in enumerate(first):
                if len(ids):
                    largest[row] = remaining_bias(self._clusters, ids)
        bounds = cluster_bounds(
            hidden, self._clusters, kind=self.settings.bounds, largest_bias=largest
        )
        upper = postprocess(bounds, scale=self._scale, softcap=self._softcap)
        if self._softcap is not None:
            # tanh of a library need not be monotone in its last bit.
            upper = np.nextafter(upper, np.float32(np.inf))
        upper[rows.flat.restricted] = -np.inf
        return upper

    # -- rescoring --------------------------------------------------------------------------------

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """Opens clusters until each row's certificate holds: the tokens known then, with canonical
        logits and a certificate per row."""
        step = thresholds.screening
        assert isinstance(step, PaperScreening)
        needs = [thresholds.rows.need(row) for row in range(len(thresholds.rows))]
        outcomes = [self._open(step, need, row) for row, need in enumerate(needs)]
        self._adapt(outcomes)
        dense = [row for row, outcome in enumerate(outcomes) if outcome.ids is None]
        every = canonical_logits(step.hidden[dense], self._weight) if dense else None
        lists = [self._ids if outcome.ids is None else outcome.ids for outcome in outcomes]
        offsets = np.cumsum([0, *(len(ids) for ids in lists)], dtype=np.int64)
        ids = np.concatenate(lists)
        products = np.empty(len(ids), np.float32)
        for row, outcome in enumerate(outcomes):
            own = products[offsets[row] : offsets[row + 1]]
            if outcome.opening is not None and outcome.ids is not None:
                own[:] = outcome.opening.products[outcome.ids]
            elif every is not None:
                own[:] = every[dense.index(row)]
        raw = self._postprocessed(products, ids)
        return Candidates(
            ids=self.owned.tokens(ids),
            raw=raw,
            offsets=offsets,
            certificates=self._certificates(step, needs, outcomes, raw, offsets),
            adjustments=thresholds.rows.flat,
        )

    def logits(self, hidden: Float32s, ids: Ids) -> Float32s:
        """Raw canonical logits [I] of one hidden state [1, d] and rows ``ids``."""
        every = np.array([0, len(ids)], np.int64)
        return self._postprocessed(canonical_logits(hidden, self._weight, ids, every), ids)

    @property
    def row_bytes(self) -> int:
        """What a canonical logit reads."""
        return self._weight.shape[1] * self._weight.element_size()

    @property
    def bound_bytes(self) -> int:
        """What the bounds of all clusters read."""
        passes = 2 if self.settings.bounds == "best" else 1
        return passes * self._clusters.metadata_bytes

    @property
    def cluster_rows(self) -> tuple[Ids, npt.NDArray[np.int64]]:
        """The rows of all clusters, one cluster after the other, and where each begins [C + 1]."""
        return self._head.order, self._head.offsets

    def log_normalizers(
        self, candidates: Candidates, rows: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """See `actors.head.output_rows.log_normalizers`."""
        return log_normalizers(candidates, rows, self.vocabulary_size)

    def _open(self, step: PaperScreening, need: Need, row: int) -> Outcome:
        """Algorithm 1 for one row, with the chosen fallback."""
        if need.kind == "dense":
            return Outcome(None, "dense", None, spent=False)
        goal = _goal(need)
        hidden = step.hidden[row]
        own = select_row(step.adjustments, row)
        noise = None
        if goal.kind == openings.GUMBEL:
            noise = self.noise(need.key, need.position)
        opening = openings.begin(
            self._head,
            hidden,
            step.upper[row],
            goal,
            own,
            step.first_ids[row],
            noise,
        )
        budget = int(self.budget)
        if need.position < self.settings.short_context:
            budget = min(2 * budget, self._size)
        found = self._advance(hidden, need, goal, own, opening, budget, UNLIMITED)
        if found is not None:
            return Outcome(found, "deterministic", opening, spent=False)
        if self.settings.fallback == "partial":
            more = math.ceil(self.settings.partial_share * len(self._clusters.radius))
            limit = opening.clusters_opened + more
            found = self._advance(hidden, need, goal, own, opening, UNLIMITED, limit)
            if found is not None:
                return Outcome(found, "deterministic", opening, spent=True)
        elif self.settings.fallback == "relaxed" and self._holds_twice(need, own, opening):
            return Outcome(opening.ids, "relaxed", opening, spent=True)
        return Outcome(None, "dense", opening, spent=True)

    def _advance(
        self,
        hidden: Float32s,
        need: Need,
        goal: Goal,
        adjustments: Adjustments,
        opening: Opening,
        row_limit: int,
        cluster_limit: int,
    ) -> Ids | None:
        """The candidates of a row once its certificate holds; None where a limit comes first."""
        while True:
            status = openings.advance(
                self._head,
                hidden,
                goal,
                adjustments,
                opening,
                row_limit=row_limit,
                cluster_limit=cluster_limit,
            )
            if goal.kind != openings.NUCLEUS:
                return opening.ids if status == CERTIFIED else None
            nucleus = self._nucleus(need, adjustments, opening)
            if nucleus is not None or status != EXAMINE:
                return nucleus

    def _nucleus(self, need: Need, adjustments: Adjustments, opening: Opening) -> Ids | None:
        """The top-p set, where what is known decides which it is."""
        ids = opening.ids
        known = self._known_logits(ids, adjustments, opening)
        outside, largest = openings.outside_log_mass(opening)
        size = nucleus_certificate(
            known, need.inverse_temperature, need.top_p, outside, -math.inf, largest
        )
        return np.sort(ids[best_ids(known, size)]) if size > 0 else None

    def _holds_twice(self, need: Need, adjustments: Adjustments, opening: Opening) -> bool:
        """Whether twice the epsilon asked for is certain."""
        if need.kind != "epsilon" or not 2 * need.epsilon < 1:
            return False
        known = self._known_logits(opening.ids, adjustments, opening)
        inside = known_log_mass(known, need.inverse_temperature)
        outside, _ = openings.outside_log_mass(opening)
        return within_odds(inside, outside, log_odds(2 * need.epsilon))

    def _known_logits(self, ids: Ids, adjustments: Adjustments, opening: Opening) -> Float32s:
        raw = self._postprocessed(opening.products[ids], ids)
        return self._adjusted(ids, raw, np.array([0, len(ids)]), adjustments)

    def _postprocessed(self, products: Float32s, ids: Ids) -> Float32s:
        bias = None if self._bias is None else self._bias[ids]
        return postprocess(products, bias=bias, scale=self._scale, softcap=self._softcap)

    def _adjusted(
        self, ids: Ids, raw: Float32s, offsets: npt.NDArray[np.int64], adjustments: Adjustments
    ) -> Float32s:
        return adjust(ids, raw, offsets, adjustments) if adjustments.active.any() else raw

    def noise(self, key: int, position: int) -> Float32s:
        """Of every row: by blocks where all tokens are rows, otherwise token by token."""
        if self.owned.whole:
            return gumbel_row(key, position, self.vocabulary_size)
        noise: Float32s = gumbel_noise(key, position, self.owned.ids)
        return noise

    def _adapt(self, outcomes: Sequence[Outcome]) -> None:
        opened = [outcome for outcome in outcomes if outcome.opening is not None]
        if self.settings.adaptive and opened:
            failures = sum(outcome.spent for outcome in opened) / len(opened)
            self.budget = next_budget(self.budget, failures, self._size)

    # -- certificates -----------------------------------------------------------------------------

    def _certificates(
        self,
        step: PaperScreening,
        needs: Sequence[Need],
        outcomes: Sequence[Outcome],
        raw: Float32s,
        offsets: npt.NDArray[np.int64],
    ) -> tuple[Certificate, ...]:
        """One per row; the bytes of a pass are shared equally by the rows it served."""
        size = self._size
        row_bytes = self.row_bytes
        dense_count = sum(outcome.ids is None for outcome in outcomes)
        dense_bytes = size * row_bytes // max(dense_count, 1)
        opened = sum(outcome.opening is not None for outcome in outcomes)
        bound_bytes = self.bound_bytes // max(opened, 1)
        tier = f"clusters-{self.settings.bounds}"
        certificates = []
        for row, (need, outcome) in enumerate(zip(needs, outcomes, strict=True)):
            if outcome.opening is None:
                certificates.append(Certificate("dense", "dense", tier, size, dense_bytes))
                continue
            known = outcome.opening.rows_known
            read = bound_bytes + known * row_bytes
            if outcome.ids is None:
                read, known = read + dense_bytes, size
            best = float(raw[offsets[row] : offsets[row + 1]].max(initial=-math.inf))
            certificates.append(
                Certificate(
                    need=need.kind,
                    guarantee=outcome.guarantee,
                    tier=tier,
                    rescored_rows=known,
                    bytes_read=read,
                    opened_share=known / size,
                    fallback=outcome.spent,
                    tightness=_tightness(best, float(step.upper[row].max())),
                )
            )
        return tuple(certificates)


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


def _goal(need: Need) -> Goal:
    scale = need.inverse_temperature
    if need.kind == "topk":
        return Goal(openings.TOP_K, need.k, 0.0, scale)
    if need.kind == "minp":
        return Goal(openings.MIN_P, 0, math.log(need.min_p), scale)
    if need.kind == "epsilon":
        return Goal(openings.EPSILON, 0, log_odds(need.epsilon), scale)
    if need.kind == "nucleus":
        return Goal(openings.NUCLEUS, 0, coverage_log_odds(need.top_p), scale)
    return Goal(openings.GUMBEL if scale else openings.GREEDY, 0, 0.0, scale)


def _tightness(best: float, largest_bound: float) -> float:
    """CSV-Decode's xi: the best logit over the largest bound; tokens that adjustments may raise
    are known first and not bounded."""
    return best / max(best, largest_bound) if 0 < best < math.inf else 0.0
