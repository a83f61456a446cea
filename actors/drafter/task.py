"""What a drafter is told of a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTask:
    """One sequence that wants guesses, and how the target will draw its tokens.

    ``history`` is prompt + output, the engine's own list: it is read during the call only, and from
    call to call nothing but its end grows. ``most`` guesses are wanted; 0 asks for nothing, and the
    drafter need not keep up either.
    """

    sequence: int  # its name
    history: list[int]
    most: int
    key: int  # of its noise
    inverse_temperature: float
