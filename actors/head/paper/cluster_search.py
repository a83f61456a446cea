"""CSV-Decode's algorithm 1 for one row: which clusters are opened next, best bound first.

Every cluster's score and the logits of what is open are known. For answers that a threshold
decides, what is known after a first round says which clusters can still matter: those, and no
others, are opened in the second. For the whole softmax what is known grows by half in every round.
A round opens all clusters down to a score, so that shards that are told it open the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.paper.clusters import OpenedClusters, draws
from lexshard.actors.head.paper.settings import PaperSettings, RowBudget
from lexshard.actors.messages import NUCLEUS_NEEDS, Certificate, Guarantee
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.certify import epsilon_certificate, nucleus_certificate
from lexshard.kernels.mass.reference import MASS_MARGIN
from lexshard.kernels.noise import gumbel_noise
from lexshard.kernels.penalties import Adjustments, adjust, select_row
from lexshard.kernels.truncate import best_ids

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

DECIDED = math.nan  # instead of a cut
EVERYTHING = -math.inf
FIRST_SHARE = 1.0 / 8.0  # of the budget, opened before anything is known
GROWTH = 0.5  # of what is known, per round, where the whole softmax is asked for


class ClusterSearch:
    """One row with ``need`` and its ``adjustments`` over clusters with ``scores`` [C] (see
    `PaperHead.bound`) and ``sizes`` [C]; ``budget`` is how many tokens it may know before the
    fallback of ``settings``. ``noise`` [V] is that of a draw, where it is known for all tokens.

    `cut` says from which score on clusters are to be open, `DECIDED` where nothing more is needed;
    `learn` takes in what that has given.
    """

    def __init__(
        self,
        need: Need,
        adjustments: Adjustments,
        scores: Float32s,
        sizes: npt.NDArray[np.int64],
        budget: int,
        settings: PaperSettings,
        noise: Float32s | None = None,
    ) -> None:
        self.need = need
        self._adjustments = adjustments
        self._scores = scores
        self._sizes = sizes
        self._budget = budget
        self._settings = settings
        self._open = np.zeros(len(scores), np.bool_)
        self._begun = False
        self._every_noise = noise
        self._noise = np.empty(0, np.float32)
        self._guarantee: Guarantee = "dense" if need.kind == "dense" else "deterministic"
        self.spent = False
        self.ids, self.raw = np.empty(0, np.int32), np.empty(0, np.float32)

    @property
    def certified(self) -> bool:
        """Whether the answer was found without every logit."""
        return self._guarantee != "dense"

    def learn(self, cut: float, ids: Ids, raw: Float32s) -> None:
        """The logits of what became known with ``cut``, which is every cluster from there on."""
        self._begun = True
        self._open |= self._scores >= cut
        self.ids, self.raw = np.concatenate([self.ids, ids]), np.concatenate([self.raw, raw])
        if draws(self.need):
            if self._every_noise is None:
                noise = gumbel_noise(self.need.key, self.need.position, ids)
            else:
                noise = self._every_noise[ids]
            self._noise = np.concatenate([self._noise, noise])

    def cut(self) -> float:
        """From which score on clusters are to be open next."""
        if self._begun and not self.certified:
            return DECIDED
        if self.need.kind == "dense":
            return EVERYTHING
        left = ~self._open & (self._scores > -np.inf)
        if not left.any():
            return DECIDED if self._begun else math.inf  # what is known first is all
        needed, wanted = left, math.ceil(GROWTH * len(self.ids))
        if not self._begun:
            wanted = max(int(FIRST_SHARE * self._budget), self.need.k, 1)
        elif self._is_mass():
            if self._mass_is_certain(left, self.need.epsilon):
                return DECIDED
        else:
            needed = left & self._may_matter(self._known())
            if not needed.any():
                return DECIDED
            wanted = int(self._sizes[needed].sum())
        more = self._budget - len(self.ids)
        cut = self._best_of(needed, wanted, at_least=True)
        if self._sizes[left & (self._scores >= cut)].sum() > more:
            cut = self._best_of(needed, more, at_least=False)
        return cut if cut > EVERYTHING else self._fall_back(left)

    def _fall_back(self, left: npt.NDArray[np.bool_]) -> float:
        """What is opened next where nothing more fits into the budget."""
        settings = self._settings
        if settings.fallback == "partial" and not self.spent:
            self.spent = True
            more = math.ceil(settings.partial_share * len(self._scores))
            best = np.sort(self._scores[left])[-more:]
            self._budget = len(self.ids) + int(self._sizes[left & (self._scores >= best[0])].sum())
            return float(best[0])
        self.spent = True
        epsilon = 2 * self.need.epsilon
        relaxed = settings.fallback == "relaxed" and self.need.kind == "epsilon" and epsilon < 1
        if relaxed and self._begun and self._mass_is_certain(left, epsilon):
            self._guarantee = "relaxed"
            return DECIDED
        self._guarantee = "dense"
        return EVERYTHING

    def answer(self) -> tuple[Ids, Float32s]:
        """The candidates, in order of id, once the row is decided."""
        order = np.argsort(self.ids)
        ids, raw = self.ids[order], self.raw[order]
        if self.need.kind not in NUCLEUS_NEEDS or not self.certified:
            return ids, raw
        left = ~self._open & (self._scores > -np.inf)
        logits = self._adjusted(ids, raw)
        size = self._nucleus(logits, left)
        if size <= 0:  # nothing can be drawn
            return ids, raw
        kept = np.sort(best_ids(logits, size))
        return ids[kept], raw[kept]

    def certificate(
        self,
        tier: str,
        vocabulary_size: int,
        row_bytes: int,
        read: int,
        largest_bound: float | None = None,
    ) -> Certificate:
        """What is promised, and what it took; ``read`` are the bytes of the row's bounds, the
        largest of which is ``largest_bound`` where scores do not say."""
        known = len(self.ids)
        certificate = Certificate(
            need=self.need.kind,
            guarantee=self._guarantee,
            tier=tier,
            rescored_rows=known,
            bytes_read=read + known * row_bytes,
            opened_share=known / vocabulary_size,
            fallback=self.spent,
        )
        if largest_bound is None:  # scores of draws are not bounds of logits
            largest_bound = math.inf if draws(self.need) else float(self._scores.max())
        best = float(self.raw.max(initial=-np.inf))
        if self.need.kind == "dense" or not 0 < best < math.inf:
            return replace(certificate, tightness=0.0)
        return replace(certificate, tightness=best / max(best, largest_bound))

    # -- what is known ----------------------------------------------------------------------------

    def _adjusted(self, ids: Ids, raw: Float32s) -> Float32s:
        if not self._adjustments.active.any():
            return raw
        order = np.argsort(ids)
        result = np.empty_like(raw)
        every = np.array([0, len(ids)], np.int64)
        result[order] = adjust(ids[order], raw[order], every, self._adjustments)
        return result

    def _known(self) -> Float32s:
        return self._adjusted(self.ids, self.raw)

    def _is_mass(self) -> bool:
        return self.need.kind in (*NUCLEUS_NEEDS, "epsilon")

    def _may_matter(self, known: Float32s) -> npt.NDArray[np.bool_]:
        """Clusters [C] that a threshold does not exclude; on equality they stay."""
        need, scores = self.need, self._scores.astype(np.float64)
        if need.kind == "topk":
            least = np.partition(known, -need.k)[-need.k] if len(known) >= need.k else -np.inf
            return np.asarray(scores >= least)
        wide = known.astype(np.float64)
        if need.kind == "minp":
            scaled = wide.max(initial=-np.inf) * need.inverse_temperature
            return np.asarray(scores * need.inverse_temperature >= scaled + math.log(need.min_p))
        if draws(need):
            wide = wide * need.inverse_temperature + self._noise
        return np.asarray(scores >= wide.max(initial=-np.inf))

    def _mass_is_certain(self, left: npt.NDArray[np.bool_], epsilon: float) -> bool:
        known, scale = self._known(), self.need.inverse_temperature
        if self.need.kind in NUCLEUS_NEEDS:
            return self._nucleus(known, left) > 0
        return epsilon_certificate(known, scale, epsilon, self._outside_mass(left))

    def _nucleus(self, known: Float32s, left: npt.NDArray[np.bool_]) -> int:
        """The size of the top-p set, where what is known decides which it is."""
        need, largest = self.need, float(self._scores[left].max(initial=-np.inf))
        outside = self._outside_mass(left)
        scale = need.inverse_temperature
        return nucleus_certificate(known, scale, need.top_p, outside, -math.inf, largest)

    def _outside_mass(self, left: npt.NDArray[np.bool_]) -> float:
        """The log of the tempered mass that is not open, rounded up."""
        if not left.any():
            return -math.inf
        tempered = self._scores[left].astype(np.float64) * self.need.inverse_temperature
        return float(np.logaddexp.reduce(np.log(self._sizes[left]) + tempered)) + MASS_MARGIN

    def _best_of(self, among: npt.NDArray[np.bool_], tokens: int, *, at_least: bool) -> float:
        """The score down to which the best clusters ``among`` all have ``tokens`` tokens, at least
        or at most; those of one score go together. `EVERYTHING` where at most means none."""
        scores, first = np.unique(-self._scores[among], return_inverse=True)
        sizes = np.cumsum(np.bincount(first, self._sizes[among], len(scores)))
        if at_least:
            if not len(scores):
                return math.inf
            return -float(scores[min(int(np.searchsorted(sizes, tokens)), len(scores) - 1)])
        fitting = int(np.searchsorted(sizes, tokens, side="right"))
        return -float(scores[fitting - 1]) if fitting else EVERYTHING


# The raw logits by shard and row of what becomes known with ``cuts`` [N] in some rows: their
# numbers, and by shard and row its ids.
Ask = Callable[[Float32s, Sequence[int], Sequence[Sequence[Ids]]], Sequence[Sequence[Float32s]]]


def search_clusters(
    rows: RowTable,
    scores: Float32s,
    sizes: npt.NDArray[np.int64],
    opened: Sequence[OpenedClusters],
    ask: Ask,
    budget: RowBudget,
    settings: PaperSettings,
    noise: Mapping[int, Float32s] | None = None,
) -> list[ClusterSearch]:
    """Opens clusters with ``scores`` [N, C], those of shard after shard, which keep count of theirs
    in ``opened``, until every row is decided."""
    searches = []
    for row in range(len(rows)):
        need, own = rows.need(row), select_row(rows.flat, row)
        drawn = None if noise is None else noise.get(row)
        most = budget.of(need.position)
        searches.append(ClusterSearch(need, own, scores[row], sizes, most, settings, drawn))
    while True:
        cuts = np.array([search.cut() for search in searches], np.float32)
        left = np.flatnonzero(~np.isnan(cuts)).tolist()
        if not left:
            budget.adapt([each.spent for each in searches if each.need.kind != "dense"])
            return searches
        ids = [[each.open(row, float(cuts[row])) for row in left] for each in opened]
        raw = ask(cuts, left, ids)
        for place, row in enumerate(left):
            own_ids = np.concatenate([theirs[place] for theirs in ids])
            own_raw = np.concatenate([theirs[place] for theirs in raw])
            searches[row].learn(float(cuts[row]), own_ids, own_raw)


def answers(
    searches: Sequence[ClusterSearch], certificates: Sequence[Certificate], rows: RowTable
) -> Candidates:
    """What the searches of ``rows`` have found."""
    found = [search.answer() for search in searches]
    return Candidates(
        ids=np.concatenate([ids for ids, _ in found]),
        raw=np.concatenate([raw for _, raw in found]),
        offsets=np.cumsum([0, *(len(ids) for ids, _ in found)], dtype=np.int64),
        certificates=tuple(certificates),
        adjustments=rows.flat,
    )
