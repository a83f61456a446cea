"""What a drafter is asked for one sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTask:
    """At most ``most`` guesses at what follows ``history``, which is the engine's own list of
    prompt and output and holds during the call.

    Whoever draws guesses with the noise of ``key`` (`kernels.noise`) at ``inverse_temperature`` (0:
    the best token) draws as the target will, and is right more often.
    """

    sequence: int
    history: list[int]
    most: int
    key: int
    inverse_temperature: float
