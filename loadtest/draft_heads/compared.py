"""The heads of a draft model side by side, each with as many tokens to look at as the router."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.drafter.heads import frequency_head, full_head, routed_head
from lexshard.actors.drafter.router.file import RouterFile
from lexshard.kernels.draft import DraftHead
from lexshard.loadtest.draft_heads.budgets import Budgets, fixed_budgets, paper_budgets_of
from lexshard.loadtest.draft_heads.standing import (
    StandingGuesses,
    accepted_lengths,
    standing_guesses,
)
from lexshard.loadtest.draft_heads.texts import DraftPositions

FULL, STATIC = "full head", "static list"
ROUTER, PAPER, FIXED = "router", "router, paper's budgets", "router, fixed budget"
AS_TRAINED = "as trained"  # how much of the vocabulary: the mean of the router file's own budgets


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Accepted guesses of every draft with one head, and the mean share of V it looked at."""

    accepted: npt.NDArray[np.int64]
    share: float

    @property
    def mean(self) -> float:
        return float(self.accepted.mean())


class DraftHeads:
    """The heads that are compared, of one draft model.

    ``shares`` of the vocabulary are compared beside that of the router's own budgets; none of
    these is in the router file, so there the paper's budgets are the position-aware ones.
    """

    def __init__(
        self, weight: torch.Tensor, router: RouterFile, steps: int, shares: Sequence[float] = ()
    ) -> None:
        self._weight = weight  # [V, d]
        self._router = router
        self._steps = steps
        self._shares = tuple(shares)
        self.full = full_head(weight)
        self.routed = routed_head(weight, router)
        self.budgets = tuple(
            int(router.budgets[min(t, len(router.budgets) - 1)]) for t in range(steps)
        )

    def static(self, tokens: float) -> DraftHead:
        """The most frequent tokens, ``tokens`` of them, rounded up."""
        return frequency_head(self._weight, self._router.frequent[: math.ceil(tokens)])

    def lengths(self, positions: DraftPositions) -> dict[str, dict[str, DraftLengths]]:
        """By size and head. Heads of one size look at as many tokens as the first of them (the
        full one apart), or a few more."""
        size = len(self._weight)
        guesses = standing_guesses(self.full, positions, size)
        full = self.counted(positions, guesses, (0,) * self._steps)
        routed = standing_guesses(self.routed, positions, size)
        tokens = routed.tokens(self.budgets)
        paper = paper_budgets_of(routed, tokens, self._steps)
        own = {ROUTER: self.budgets, PAPER: paper}
        compared = {AS_TRAINED: {FULL: full, **self.of_size(positions, routed, tokens, own)}}
        for share in self._shares:
            paper = paper_budgets_of(routed, share * size, self._steps)
            rivals = self.of_size(positions, routed, routed.tokens(paper), {PAPER: paper})
            compared[f"{100 * share:g}%"] = {FULL: full, **rivals}
        return compared

    def of_size(
        self,
        positions: DraftPositions,
        routed: StandingGuesses,
        tokens: float,
        own: Mapping[str, Budgets],
    ) -> dict[str, DraftLengths]:
        """The router with its ``own`` budgets and with a fixed one, and a static list."""
        listed = standing_guesses(self.static(tokens), positions, len(self._weight))
        tried = {**own, FIXED: fixed_budgets(routed, tokens, self._steps)}
        return {
            **{name: self.counted(positions, routed, budgets) for name, budgets in tried.items()},
            STATIC: self.counted(positions, listed, (0,) * self._steps),
        }

    def counted(
        self, positions: DraftPositions, guesses: StandingGuesses, budgets: Budgets
    ) -> DraftLengths:
        """What guesses come to with these clusters in the steps of a draft."""
        accepted = accepted_lengths(positions.text, guesses.by_step(budgets))
        return DraftLengths(accepted, guesses.tokens(budgets) / len(self._weight))
