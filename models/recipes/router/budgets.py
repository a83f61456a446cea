"""How many clusters each step of a draft looks at, as measured on held-out texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.loadtest.draft_heads.budgets import Budgets
from lexshard.loadtest.draft_heads.standing import StandingGuesses

INCREMENTS = (1, 2, 4, 8, 16)  # clusters: one more may add nothing where eight add much


def expected_length(
    guesses: StandingGuesses, text: npt.NDArray[np.int32], budgets: Sequence[int]
) -> float:
    """Mean accepted guesses of a draft that begins at any position with room for all its steps."""
    steps = len(budgets)
    begins = len(text) - steps + 1
    room = text[:begins] == text[steps - 1 :]
    alive, total = room, 0
    for step, stands in enumerate(guesses.by_step(budgets)):
        alive = alive & stands[step : step + begins]
        total += int(alive.sum())
    return total / max(int(room.sum()), 1)


def choose_budgets(
    guesses: StandingGuesses, text: npt.NDArray[np.int32], steps: int, tokens: float
) -> Budgets:
    """The budgets, 1 at least, that look at ``tokens`` tokens at most and accept the most.

    From one cluster for every step on, clusters go to the step where they add the most accepted
    guesses for each token looked at. ``text`` [N] names the text of every position, ascending.
    """
    budgets: Budgets = (1,) * steps
    length = expected_length(guesses, text, budgets)
    while True:
        best, best_gain = None, 0.0
        for step in range(steps):
            for more in INCREMENTS:
                tried = (*budgets[:step], budgets[step] + more, *budgets[step + 1 :])
                cost = guesses.tokens(tried) - guesses.tokens(budgets)
                if cost <= 0 or guesses.tokens(tried) > tokens:
                    continue
                longer = expected_length(guesses, text, tried)
                if (longer - length) / cost > best_gain:
                    best, best_gain, best_length = tried, (longer - length) / cost, longer
        if best is None:
            return budgets
        budgets, length = best, best_length
