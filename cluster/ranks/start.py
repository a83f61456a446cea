"""The other ranks of a body: what an engine is given to start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.actors.body.parallel.messages import RankPart
from lexshard.actors.body.parallel.parallel_body import OtherRanks
from lexshard.cluster.ranks.processes import RankProcesses


@dataclass(frozen=True, slots=True)
class RankStarter:
    """As children of this process. ``seconds`` is how long a rank may keep a step waiting."""

    seconds: float

    def __call__(self, parts: Sequence[RankPart]) -> OtherRanks:
        return RankProcesses(parts, seconds=self.seconds)
