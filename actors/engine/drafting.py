"""What the engine asks of a drafter: guesses at the tokens that sequences will draw next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses that the next step verifies; they change when tokens come, never which."""

    def propose(
        self, sequences: Sequence[int], histories: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        """Per sequence (its name and its prompt + output) the ids guessed to follow, any number.

        ``histories`` are the engine's own lists: they hold until the call returns.
        """
