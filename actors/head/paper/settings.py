"""How the paper's own mode is run, and its adaptive budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lexshard.kernels.bounds import Kind

Fallback = Literal["full", "partial", "relaxed"]


@dataclass(frozen=True, slots=True)
class PaperSettings:
    """CSV-Decode's knobs.

    - ``bounds``: of a cluster, by its ball, its cone, or the better of the two.
    - ``budget_share``: ``K_max``, the most rows one token may open, as a share of the vocabulary.
      Contexts of fewer than ``short_context`` tokens may open twice that.
    - ``adaptive``: whether ``K_max`` follows the rate of failures (see `next_budget`).
    - ``fallback``: what happens when the budget is spent. ``full`` computes every logit;
      ``partial`` opens ``partial_share`` of the clusters more before that; ``relaxed`` accepts
      twice the epsilon where epsilon was asked for, and says so, and is ``full`` elsewhere.
    - ``epsilon``: where set, draws from the whole vocabulary are made from opened tokens within
      this total variation, as in the paper; where not, they are exact.

    Raises `ValueError` for values out of range.
    """

    bounds: Kind = "best"
    budget_share: float = 0.25
    short_context: int = 8
    adaptive: bool = True
    fallback: Fallback = "full"
    partial_share: float = 0.1
    epsilon: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.budget_share <= 1:
            raise ValueError(f"budget share {self.budget_share} is not above 0 and at most 1")
        if not 0 < self.partial_share <= 1:
            raise ValueError(f"partial share {self.partial_share} is not above 0 and at most 1")
        if self.epsilon is not None and not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon {self.epsilon} is not between 0 and 1")
        if self.bounds not in ("ball", "cone", "best"):
            raise ValueError(f"bounds are 'ball', 'cone' or 'best', not {self.bounds!r}")
        if self.fallback not in ("full", "partial", "relaxed"):
            raise ValueError(f"fallbacks are 'full', 'partial', 'relaxed', not {self.fallback!r}")


BUDGET_RATE = 0.01
WANTED_FAILURES = 0.02


class RowBudget:
    """``K_max`` over ``size`` rows: what a row may open, and how that follows its use."""

    def __init__(self, settings: PaperSettings, size: int) -> None:
        self._settings = settings
        self._size = size
        self.rows = settings.budget_share * size

    def of(self, position: int) -> int:
        """The rows that one at this position may know."""
        short = position < self._settings.short_context
        return min(int(2 * self.rows if short else self.rows), self._size)

    def adapt(self, spent: Sequence[bool]) -> None:
        """After a step in which some of its rows, those that are True, had spent theirs."""
        if self._settings.adaptive and spent:
            self.rows = next_budget(self.rows, sum(spent) / len(spent), self._size)


def next_budget(budget: float, failures: float, vocabulary_size: int) -> float:
    """``K_max`` of the next step, from the share of rows that spent it in this one.

    ``K (1 + 0.01 (failures - 0.02))``, between 1 and the vocabulary. CSV-Decode prints the
    difference the other way round, which takes rows away from a budget that is too small: it runs
    off to always or never falling back instead of keeping the rate at 0.02.
    """
    changed = budget * (1.0 + BUDGET_RATE * (failures - WANTED_FAILURES))
    return min(max(changed, 1.0), float(vocabulary_size))
