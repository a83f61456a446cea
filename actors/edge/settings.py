"""How a device drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lexshard.actors.edge.threshold import ConformalThreshold

EdgeMode = Literal["same-token", "ksqs", "csqs", "qs"]
MOST_GUESSES = 255  # of a batch


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """A batch ends before it would exceed ``budget_bits`` (of guesses, not of its header) and after
    ``longest`` guesses. ``thrift`` is `DraftPace`'s, ``size`` and ``resolution`` `FrameCodec`'s;
    what follows is `ConformalThreshold`'s. Raises ValueError for what does not fit or bounds
    nothing."""

    mode: EdgeMode = "same-token"
    size: int = 32
    resolution: int = 100
    budget_bits: int = 5_000
    longest: int = 16
    thrift: float = 0.1
    alpha: float = 0.05
    eta: float = 0.01
    first_threshold: float = 0.01

    def __post_init__(self) -> None:
        if self.budget_bits < 1 or not 1 <= self.longest <= MOST_GUESSES:
            raise ValueError(f"a batch has 1 to {MOST_GUESSES} guesses and a budget above 0 bits")
        if not 0 <= self.thrift <= 1:
            raise ValueError(f"thrift {self.thrift} must be from 0 to 1")
        self.threshold()

    def threshold(self) -> ConformalThreshold:
        """Of one text, in mode ``csqs``."""
        return ConformalThreshold(self.alpha, self.eta, self.first_threshold)
