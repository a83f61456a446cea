"""Which low-precision copy of the output weights screens a step.

A ladder holds the copies and, by the number of rows in a step and by what they need, the one to
start with: 50 best tokens crowd a coarse copy long before the best one does. Where a step leaves
more tokens than a rung is worth, later steps start elsewhere for a while: the tokens
that are drawn do not change, only what finding them costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.head.screens import DENSE
from actors.messages import Need
from kernels.quantize import Int4Tier, Tier

# A screen that leaves more than this share of the vocabulary, on a moving average, does not pay:
# refining and rescoring what is left costs more than a more precise screen would.
CROWDED_SHARE = 1.0 / 16.0
WEIGHT_OF_LAST = 1.0 / 8.0
# How many steps stay away from a crowded screen, doubling while it stays crowded.
FIRST_PAUSE = 32
LONGEST_PAUSE = 2048


Choices = tuple[tuple[int, str], ...]
# Whether the rows of a step need one token each, or any of them its several best.
StepKind = Literal["one", "several"]
STEP_KINDS: tuple[StepKind, ...] = ("one", "several")


def step_kind(needs: Sequence[Need]) -> StepKind:
    """The kind of a step with ``needs``."""
    return "several" if any(need.kind == "topk" for need in needs) else "one"


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


class Pauses:
    """Which ways are not worth trying for a while, by how often they failed lately."""

    def __init__(self) -> None:
        self._length: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def allows(self, name: str) -> bool:
        """Whether ``name`` is worth a try now; counts down its pause otherwise."""
        left = self._left.get(name, 0)
        if left:
            self._left[name] = left - 1
        return left == 0

    def record(self, name: str, *, failed: bool) -> None:
        """A try of ``name`` has failed or not: failures in a row pause it ever longer."""
        if not failed:
            self._length.pop(name, None)
            return
        length = min(2 * self._length.get(name, FIRST_PAUSE // 2), LONGEST_PAUSE)
        self._length[name] = self._left[name] = length


class Crowding:
    """How much the screens have left lately."""

    def __init__(self) -> None:
        self._share: dict[str, float] = {}

    def record(self, name: str, share: float) -> bool:
        """Whether ``name`` leaves too much, now that it has left ``share`` of the vocabulary."""
        average = self._share.get(name, 0.0)
        average += WEIGHT_OF_LAST * (share - average)
        crowded = average > CROWDED_SHARE
        self._share[name] = 0.0 if crowded else average
        return crowded
