"""What a drafter is asked for one sequence, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from actors.proposal import Proposal


@dataclass(frozen=True, slots=True)
class DraftTask:
    """At most ``most`` guesses at what follows ``history``, which is the engine's own list of
    prompt and output and holds during the call.

    Whoever draws guesses with the noise of ``key`` (`kernels.noise`) at ``inverse_temperature`` (0:
    the best token) draws as the target will, and is right more often. ``propose`` says that what
    each guess was drawn from is wanted, too.
    """

    sequence: int
    history: list[int]
    most: int
    key: int
    inverse_temperature: float
    propose: bool = False


class Draft(NamedTuple):
    """The guesses for one sequence. ``proposals`` are what they were drawn from, where that was
    asked for and the drafter was not certain of them."""

    token_ids: Sequence[int] = ()
    proposals: Sequence[Proposal] = ()
