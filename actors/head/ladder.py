"""Which low-precision copy of the output weights screens a step.

A ladder holds the copies and, by the number of rows in a step and by what they need, the one to
start with: a coarse copy leaves many tokens beside the 50 best long before it does beside the best
one. Where a step leaves more than a rung is worth, later steps start elsewhere for a while
(`actors.head.backoff`): the tokens that are drawn do not change, only what finding them costs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from lexshard.actors.head.screens import DENSE
from lexshard.actors.messages import NeedKind
from lexshard.kernels.quantize import Int4Tier, Tier

Choices = tuple[tuple[int, str], ...]
# Whether the rows of a step need one token each, or any of them its several best.
StepKind = Literal["one", "several"]
STEP_KINDS: tuple[StepKind, ...] = ("one", "several")


def step_kind(kinds: Collection[NeedKind]) -> StepKind:
    """The kind of a step whose rows ask for ``kinds``: of a nucleus, too, bounds must be tight."""
    return "several" if "topk" in kinds or "nucleus-draw" in kinds else "one"


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """Tiers by name, and which to start with: ``choices`` are (from so many rows on, name).

    Steps with top-k rows have choices of their own in ``for_several``; None stands for the same.
    Choices ascend and begin at one row; a name is a tier's or `DENSE`. Raises ValueError where a
    choice names no tier or choices do not begin at one row.
    """

    tiers: Mapping[str, Tier]
    choices: Choices
    for_several: Choices | None = None

    def __post_init__(self) -> None:
        for kind in STEP_KINDS:
            choices = self._choices(kind)
            if not choices or choices[0][0] != 1:
                raise ValueError("the first choice of a ladder is for one row")
            for _, name in choices:
                if name != DENSE and name not in self.tiers:
                    raise ValueError(f"the ladder has no tier {name!r}")

    @property
    def fine(self) -> Int4Tier | None:
        """The tier whose two planes refine what another one leaves, if there is one."""
        tier = self.tiers.get("int4")
        return tier if isinstance(tier, Int4Tier) else None

    def choice(self, rows: int, kind: StepKind = "one") -> str:
        """What screens a step of ``rows`` rows."""
        return max(each for each in self._choices(kind) if each[0] <= rows)[1]

    def _choices(self, kind: StepKind) -> Choices:
        own = self.for_several if kind == "several" else None
        return self.choices if own is None else own
