"""Which screen a shard's next step begins with: the ladder's choice, but for a while not those that
left too much or told too little lately."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from lexshard.actors.head.backoff import (
    LARGEST_AVERAGE,
    LARGEST_UNCERTAIN,
    Backoff,
    ShareLeft,
)
from lexshard.actors.head.ladder import Choices, Ladder, step_kind
from lexshard.actors.head.screens import Screen
from lexshard.actors.messages import NeedKind

# What bounds are tried for beside finding candidates: the mass of a row's tokens, whether what it
# draws is in its nucleus, whether a guess stands.
Purpose = Literal["mass", "members", "tests"]


class ScreenChoice:
    """The choice among ``screens``, of which ``dense`` is always good; ``ladder`` None has only
    that."""

    def __init__(self, dense: Screen, screens: Sequence[Screen], ladder: Ladder | None) -> None:
        self._dense = dense
        self._ladder = ladder
        self._by_name = {screen.name: screen for screen in screens}
        self._by_bytes = sorted(screens, key=lambda screen: screen.bytes_per_pass)
        self._forget()

    def _forget(self) -> None:
        self._share = ShareLeft(LARGEST_AVERAGE)
        self._uncertain = ShareLeft(LARGEST_UNCERTAIN)
        self._backoff = Backoff()

    def start_with(self, choices: Choices, for_several: Choices | None) -> None:
        """See `Shard.start_with`."""
        if self._ladder is None:
            raise ValueError("a shard without a ladder has no choice")
        self._ladder = replace(self._ladder, choices=choices, for_several=for_several)
        self._forget()

    def next_for(self, kinds: Sequence[NeedKind], *, draws: bool) -> Screen:
        """The ladder's choice for rows that ask for ``kinds``, or the next more precise screen that
        is worth a try now; whether one of them ``draws`` from a nucleus."""
        if self._ladder is None:
            return self._dense
        chosen = self._by_name[self._ladder.choice(len(kinds), step_kind(kinds))]
        order = [chosen, *self._by_bytes[self._by_bytes.index(chosen) + 1 :]]
        allowed = (
            each
            for each in order
            if self._backoff.allows(_candidates(each, kinds))
            and (not draws or self.allows("members", each))
        )
        return next(allowed, self._dense)

    def allows(self, purpose: Purpose, screen: Screen | None = None) -> bool:
        """Whether bounds, or those of ``screen``, are worth a try now."""
        return self._backoff.allows(_bounds(purpose, screen))

    def record(self, purpose: Purpose, screen: Screen | None = None, *, failed: bool) -> None:
        """How a try went."""
        self._backoff.record(_bounds(purpose, screen), failed=failed)

    def record_candidates(
        self, screen: Screen, kinds: Collection[NeedKind], excess: int, tokens: int
    ) -> None:
        """Of the ``tokens`` of all its rows ``screen`` has left so many beside the leaders."""
        use = _candidates(screen, kinds)
        self._backoff.record(use, failed=self._share.record(use, max(0, excess) / tokens))

    def record_draws(self, screen: Screen, tried: int, left: int) -> None:
        """Of so many rows that draw from a nucleus, bounds of ``screen`` have left some open."""
        if tried:
            use = _bounds("members", screen)
            self._backoff.record(use, failed=self._uncertain.record(use, left / tried))


def _candidates(screen: Screen, kinds: Collection[NeedKind]) -> str:
    return f"{screen.name} for {step_kind(kinds)}"


def _bounds(purpose: Purpose, screen: Screen | None) -> str:
    return purpose if screen is None else f"{purpose} by {screen.name}"
