"""The search of one row at the root of CSV-Decode's exchange: which clusters are opened next.

The root knows every cluster's score and the logits of what is open. For answers that a threshold
decides, what is known after a first round says which clusters can still matter: those, and no
others, are opened in the second. The whole softmax takes as many rounds as the budget has
doublings.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lexshard.actors.head.paper.cluster_shard import draws
from lexshard.actors.messages import Certificate
from lexshard.actors.states.need import Need
from lexshard.kernels.certify import epsilon_certificate, nucleus_certificate
from lexshard.kernels.mass.reference import MASS_MARGIN
from lexshard.kernels.noise import gumbel_noise
from lexshard.kernels.penalties import Adjustments, adjust
from lexshard.kernels.truncate import best_ids

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

DECIDED = math.nan  # instead of a cut
EVERYTHING = -math.inf
FIRST_SHARE = 1.0 / 8.0  # of the budget, opened before anything is known


class ClusterSearch:
    """One row with ``need`` and its ``adjustments`` over clusters with ``scores`` [C] (see
    `ClusterShard.bound`) and ``sizes`` [C]; ``budget`` is how many tokens it may know before it
    gets every logit.

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
    ) -> None:
        self.need = need
        self._adjustments = adjustments
        self._scores = scores
        self._sizes = sizes
        self._budget = budget
        self._open = np.zeros(len(scores), np.bool_)
        self._begun = False
        self._noise = np.empty(0, np.float32)
        self.spent = False
        self.ids, self.raw = np.empty(0, np.int32), np.empty(0, np.float32)

    @property
    def certified(self) -> bool:
        """Whether the answer was found without every logit."""
        return self.need.kind != "dense" and not self.spent

    def learn(self, cut: float, ids: Ids, raw: Float32s) -> None:
        """The logits of what became known with ``cut``, which is every cluster from there on."""
        self._begun = True
        self._open |= self._scores >= cut
        self.ids, self.raw = np.concatenate([self.ids, ids]), np.concatenate([self.raw, raw])
        if draws(self.need):
            noise = gumbel_noise(self.need.key, self.need.position, ids)
            self._noise = np.concatenate([self._noise, noise])

    def cut(self) -> float:
        """From which score on clusters are to be open next."""
        if self.need.kind == "dense":
            return DECIDED if self._begun else EVERYTHING
        left = ~self._open & (self._scores > -np.inf)
        if not self._begun:
            least = max(int(FIRST_SHARE * self._budget), self.need.k, 1)
            return self._best_of(left, min(least, self._budget), at_least=True)
        if self.spent or not left.any():
            return DECIDED
        known = self._known()
        if self._is_mass():
            if self._mass_is_certain(known, left):
                return DECIDED
            cut = self._best_of(left, len(self.ids), at_least=True)
            if self._sizes[left & (self._scores >= cut)].sum() > self._budget - len(self.ids):
                cut = self._best_of(left, self._budget - len(self.ids), at_least=False)
        else:
            needed = left & self._may_matter(known)
            if not needed.any():
                return DECIDED
            more = self._budget - len(self.ids)
            if self._sizes[needed].sum() <= more:
                return float(self._scores[needed].min())
            cut = self._best_of(needed, more, at_least=False)
        self.spent = cut == EVERYTHING
        return cut

    def answer(self) -> tuple[Ids, Float32s]:
        """The candidates, in order of id, once the row is decided."""
        order = np.argsort(self.ids)
        ids, raw = self.ids[order], self.raw[order]
        if self.need.kind != "nucleus" or not self.certified:
            return ids, raw
        left = ~self._open & (self._scores > -np.inf)
        logits = self._adjusted(ids, raw)
        size = self._nucleus(logits, left)
        if size <= 0:  # nothing can be drawn
            return ids, raw
        kept = np.sort(best_ids(logits, size))
        return ids[kept], raw[kept]

    def certificate(
        self, tier: str, vocabulary_size: int, row_bytes: int, read: int
    ) -> Certificate:
        """What is promised, and what it took; ``read`` are the bytes of the row's bounds."""
        known = len(self.ids)
        certificate = Certificate(
            need=self.need.kind,
            guarantee="deterministic" if self.certified else "dense",
            tier=tier,
            rescored_rows=known,
            bytes_read=read + known * row_bytes,
            opened_share=known / vocabulary_size,
            fallback=self.spent,
        )
        if draws(self.need) or self.need.kind == "dense":
            return replace(certificate, tightness=0.0)  # scores are not bounds of logits
        best = float(self.raw.max(initial=-np.inf))
        largest = max(best, float(self._scores.max(initial=-np.inf)))
        return replace(certificate, tightness=best / largest if 0 < best < math.inf else 0.0)

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
        return self.need.kind in ("nucleus", "epsilon")

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

    def _mass_is_certain(self, known: Float32s, left: npt.NDArray[np.bool_]) -> bool:
        if self.need.kind == "nucleus":
            return self._nucleus(known, left) > 0
        scale = self.need.inverse_temperature
        return epsilon_certificate(known, scale, self.need.epsilon, self._outside_mass(left))

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
