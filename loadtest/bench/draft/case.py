"""One task at one temperature: how many guesses stand with each head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from actors.drafter.acceptance import StandingGuesses, accepted_lengths, standing_guesses
from actors.drafter.heads import frequency_head, full_head, routed_head
from actors.drafter.router.budgets import fixed_budgets
from actors.drafter.router.file import RouterFile
from actors.drafter.router.texts import DraftPositions
from loadtest.bench.record import CaseLabels, Measure, Report

FULL, ROUTER, FIXED, STATIC = "full head", "router", "router, fixed budget", "static list"

ACCEPTED = Measure("accepted guesses", "per draft", higher_is_better=True)
LOOKED = Measure("vocabulary looked at", "%", higher_is_better=False)


@dataclass(frozen=True, slots=True)
class DraftLengths:
    """Accepted guesses of every draft with one head, and the mean share of V it looked at."""

    accepted: npt.NDArray[np.int64]
    share: float

    @property
    def mean(self) -> float:
        return float(self.accepted.mean())


class DraftHeads:
    """The heads that are compared, of one draft model."""

    def __init__(self, weight: torch.Tensor, router: RouterFile, steps: int) -> None:
        self._weight = weight  # [V, d]
        self._router = router
        self._steps = steps
        self.full = full_head(weight)
        self.routed = routed_head(weight, router)
        self.budgets = tuple(
            int(router.budgets[min(t, len(router.budgets) - 1)]) for t in range(steps)
        )

    def lengths(self, positions: DraftPositions) -> dict[str, DraftLengths]:
        """By head; the fixed budget and the static list look at as many tokens as the router."""
        size = len(self._weight)
        full = standing_guesses(self.full, positions, size)
        routed = standing_guesses(self.routed, positions, size)
        tokens = routed.tokens(self.budgets)
        listed = self._router.frequent[: math.ceil(tokens)]
        static = standing_guesses(frequency_head(self._weight, listed), positions, size)
        everywhere = (0,) * self._steps  # heads without a router have no budget
        return {
            FULL: self._lengths(positions, full, everywhere),
            ROUTER: self._lengths(positions, routed, self.budgets),
            FIXED: self._lengths(positions, routed, fixed_budgets(routed, tokens, self._steps)),
            STATIC: self._lengths(positions, static, everywhere),
        }

    def _lengths(
        self, positions: DraftPositions, guesses: StandingGuesses, budgets: tuple[int, ...]
    ) -> DraftLengths:
        accepted = accepted_lengths(positions.text, guesses.by_step(budgets))
        return DraftLengths(accepted, guesses.tokens(budgets) / len(self._weight))


def record_lengths(report: Report, labels: CaseLabels, lengths: Mapping[str, DraftLengths]) -> None:
    """One figure of every head: drafts of different heads begin at different places."""
    report.add(labels, ACCEPTED, {name: [each.mean] for name, each in lengths.items()}, ours=ROUTER)
    report.add(labels, LOOKED, {name: [100 * each.share] for name, each in lengths.items()})
