"""What the engine asks of a drafter: guesses at the tokens that sequences will draw next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lexshard.actors.drafter.task import Draft, DraftTask


class Drafter(Protocol):
    """Guesses that the next step verifies; they change when tokens come, never which."""

    name: str

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft]:
        """Per task the ids guessed to follow, none to ``most`` of them."""

    def forget(self, sequence: int) -> None:
        """A sequence has ended. One that was never drafted for may be named, too."""
