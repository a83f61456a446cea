"""How many clusters each step of a draft looks at.

The first guess decides whether the others count at all, so it is worth the most (DynaSpec,
section 4.3).
"""

from __future__ import annotations

import numpy as np

from lexshard.loadtest.draft_heads.standing import StandingGuesses

Budgets = tuple[int, ...]


def paper_budgets(most: int, steps: int) -> Budgets:
    """``most`` clusters for the first guess, then ``floor(most / (2 (t + 1)))``, at least 1."""
    return (most, *(max(1, most // (2 * (step + 1))) for step in range(1, steps)))


def fixed_budgets(guesses: StandingGuesses, tokens: float, steps: int) -> Budgets:
    """The least number of clusters, the same in every step, that hold ``tokens`` tokens or more."""
    least = int(np.searchsorted(guesses.looked, tokens))
    return (min(least, len(guesses.looked) - 1),) * steps


def paper_budgets_of(guesses: StandingGuesses, tokens: float, steps: int) -> Budgets:
    """`paper_budgets` with the least ``most`` that looks at ``tokens`` tokens or more.

    ``most`` may be more clusters than there are: later steps can then have more than half of all.
    """
    enough = 2 * steps * (len(guesses.looked) - 1)  # every cluster in every step
    tried = (paper_budgets(most, steps) for most in range(1, enough))
    return next(
        (budgets for budgets in tried if guesses.tokens(budgets) >= tokens),
        paper_budgets(enough, steps),
    )
