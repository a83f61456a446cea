"""What a drafter is asked for one sequence, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lexshard.actors.proposal import Proposal
from lexshard.actors.states.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class DraftTask:
    """At most ``most`` guesses at what follows ``history``, which is the engine's own list of
    prompt and output and holds during the call.

    Whoever draws guesses with the noise of ``key`` (`kernels.noise`) at ``inverse_temperature`` (0:
    the best token) from what top-k (0: all), top-p and min-p leave draws as the target will, and is
    right more often. ``propose`` says that what each guess was drawn from is wanted, too. The last
    ``ahead`` tokens of the history are guesses themselves: the next history may have others.
    """

    sequence: int
    history: list[int]
    most: int
    key: int
    inverse_temperature: float
    propose: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ahead: int = 0

    @classmethod
    def of(
        cls,
        sequence: int,
        state: SequenceState,
        history: list[int],
        most: int,
        *,
        propose: bool,
        ahead: int = 0,
    ) -> DraftTask:
        """Drawn as the target draws what ``state`` is of."""
        key, heat, top_k = state.key, state.inverse_temperature, state.top_k
        top_p, min_p = state.parameters.top_p, state.parameters.min_p
        return cls(sequence, history, most, key, heat, propose, top_k, top_p, min_p, ahead)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are left out before the draw; never at temperature 0."""
        chosen = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return chosen and self.inverse_temperature > 0

    @property
    def log_min_p(self) -> float:
        return math.log(self.min_p) if self.min_p > 0 else -math.inf


class Draft(NamedTuple):
    """The guesses for one sequence. ``proposals`` are what they were drawn from, where that was
    asked for and the drafter was not certain of them. ``reads`` says that it may not have read all
    of the history yet, so that to have none says nothing."""

    token_ids: Sequence[int] = ()
    proposals: Sequence[Proposal] = ()
    reads: bool = False
