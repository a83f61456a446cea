"""Rows that draw from their nucleus, searched as if they drew from all tokens.

What such a row draws from all tokens is what it draws from the nucleus, if it lies there, and that
bounds can tell without knowing the nucleus (`kernels.mass.stands`): its set takes the mass of the
whole softmax, exactly, where this takes that all better tokens certainly hold too little. Tokens
that weigh most have their canonical logits, all others their bounds.

If the token certainly lies outside, so do all that are no better, and what is drawn from the others
is tried in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.head.rescoring import Rescorer
from lexshard.actors.head.screens import ScreenedRows
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.masks import mask_words
from lexshard.kernels.mass import (
    TRIES,
    Logits,
    adjusted_bounds,
    block_ceilings,
    drawn,
    heaviest_tokens,
    stands,
)
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import (
    Estimates,
    Needs,
    find_candidates,
    find_leaders,
    find_thresholds,
)

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CertainDraw:
    """Tokens of which a row's nucleus certainly holds the one that is drawn."""

    ids: Ids  # [K] sorted
    computed: int  # canonical logits that it took


def certain_draws(
    screened: ScreenedRows,
    lists: Mapping[int, Ids],
    largest: npt.NDArray[np.float64],
    rescorer: Rescorer,
    hidden: npt.NDArray[np.float32],
    asked: RowTable,
    *,
    tight: bool,
) -> dict[int, CertainDraw]:
    """By row, what is certain of those whose candidates are ``lists``. No token's upper bound is
    above ``largest`` [N]; the rows of ``rescorer`` are the whole vocabulary. Where bounds are
    ``tight`` they may tell of tokens outside, too."""
    place = {row: index for index, row in enumerate(screened.rows.tolist())}
    certain: dict[int, CertainDraw] = {}
    for row, ids in lists.items():
        maxima = screened.leaders.maxima[place[row]]
        draw = _Draw(*screened.one_row(place[row]), rescorer, hidden[row : row + 1], maxima)
        found = draw.of(ids, float(asked.controls.top_p[row]), float(largest[row]), tight)
        if found is not None:
            certain[row] = found
    return certain


@dataclass(slots=True, eq=False)
class _Draw:
    """One row, by its bounds."""

    estimates: Estimates
    needs: Needs
    adjustments: Adjustments
    rescorer: Rescorer
    hidden: npt.NDArray[np.float32]  # [1, d]
    maxima: npt.NDArray[np.float32]  # [V / 64] of the estimates that its mask holds
    computed: int = 0

    def of(self, ids: Ids, top_p: float, largest: float, tight: bool) -> CertainDraw | None:
        """What is certain of a row whose candidates are ``ids``; of ``tight`` bounds the token that
        it draws alone."""
        bounds = (self.estimates, self.needs, self.adjustments)
        candidates = self._exact(ids)
        ceilings = block_ceilings(self.estimates, self.adjustments, self.maxima)
        known = self._exact(heaviest_tokens(self.estimates, self.adjustments, ceilings))
        for left in reversed(range(TRIES if tight else 1)):
            place = drawn(self.needs, candidates)
            if place < 0:
                return None
            token = candidates.at(place)
            told = (*bounds, top_p, token, largest, ceilings, known)
            if stands(*told):
                return CertainDraw(token.ids if tight else ids, self.computed)
            if not left or not stands(*told, inside=False):
                return None
            better = self._better(token)
            if better is None:
                return None
            candidates = better
        return None

    def _better(self, token: Logits) -> Logits | None:
        """What is drawn from the tokens that are better than one; None where bounds are too loose
        to tell these apart."""
        size = self.estimates.row_slack.shape[1]
        _, upper = adjusted_bounds(self.estimates, size, self.adjustments)
        allowed = upper >= token.logits[0]
        allowed[token.ids[0]] = False
        words = mask_words(np.flatnonzero(allowed), size)
        masked = self.adjustments._replace(
            active=np.ones(1, np.bool_), masks=words[None], mask=np.zeros(1, np.int64)
        )
        leaders = find_leaders(self.estimates, size, self.needs, masked)
        exact = self._exact(leaders.ids)
        tau = find_thresholds(leaders.ids, exact.logits, leaders.offsets, self.needs)
        found = find_candidates(self.estimates, size, self.needs, masked, tau, leaders)
        candidates = self._exact(found.ids)
        place = drawn(self.needs, candidates)
        if place < 0:
            return None
        best = candidates.at(place)
        better = (best.logits > token.logits) | (
            (best.logits == token.logits) & (best.ids < token.ids)
        )
        return best if better[0] else None

    def _exact(self, ids: Ids) -> Logits:
        self.computed += len(ids)
        return Logits(ids, self.rescorer.of_row(self.hidden, self.adjustments, ids))
