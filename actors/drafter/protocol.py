"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.drafter.task import DraftTask


class Drafter(Protocol):
    """Guesses that the next step verifies; they change when tokens come, never which."""

    name: str

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """The ids guessed to follow each task's history, at most as many as it wants."""

    def forget(self, sequence: int) -> None:
        """The sequence has ended; unknown names are ignored."""
