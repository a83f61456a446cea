"""How much is guessed over a thin link, or drawn alone: whatever brings more tokens per second.

A batch of ``k`` guesses takes ``k`` drafts and the bits of ``k`` guesses, then one round trip; of
guesses that stand with probability ``a`` each it brings ``(1 - a^(k+1)) / (1 - a)`` tokens. While a
batch travels, guesses go on behind it as long as it is likely enough that all before them stand.
To a target that draws alone round trips are nothing: it is asked for more before it stops.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

WEIGHT = 0.97  # of what was measured before, each time
LEAST_LIKELY, MOST_LIKELY = 0.02, 0.995  # that a guess stands: one never knows
FIRST_ACCEPTANCE, PRIOR_GUESSES = 0.7, 4.0
FIRST_GUESSES, FIRST_ALONE = 4, 16  # while nothing is known
HICCUP_SECONDS = 0.02
LEAST_ALONE, MOST_ALONE = 8, 128  # tokens of a run


class Pace(NamedTuple):
    """So many guesses, then so many tokens of the target's own."""

    guesses: int
    alone: int = 0


class DraftPace:
    """Learns what drafting, sending and waiting cost on this link, in seconds, and what guesses are
    worth. A batch has ``longest`` at most. ``thrift`` is how likely one must be to be drafted
    ahead, and by which part a target that draws alone must be the quicker: 0 saves time, 1 energy.
    """

    def __init__(self, *, longest: int, thrift: float) -> None:
        self._longest = longest
        self._thrift = thrift
        self._tested = self._stood = 0.0
        self._draft = 0.0  # of one guess
        self._guess_bits = 0.0
        self._trips = _Line()  # by the bits of a batch
        self._own = self._told = 0.0  # of a token of the target's own, as it comes, and as it says

    @property
    def acceptance(self) -> float:
        """How likely the next guess is to stand."""
        stood = self._stood + PRIOR_GUESSES * FIRST_ACCEPTANCE
        return min(MOST_LIKELY, max(LEAST_LIKELY, stood / (self._tested + PRIOR_GUESSES)))

    @property
    def round_trip(self) -> float:
        """From sending an empty batch to its verdict."""
        return max(1e-9, self._trips.at(0.0))

    def drafted(self, guesses: int, seconds: float, bits: int) -> None:
        """Drafting took so long, and makes a batch of so many bits."""
        self._draft = _blend(self._draft, seconds / guesses)
        self._guess_bits = _blend(self._guess_bits, bits / guesses)

    def connected(self, seconds: float) -> None:
        """A connection took so long: the first that is heard of the way."""
        if not self._trips.known:
            self._trips.add(0.0, seconds)

    def travelled(self, bits: int, seconds: float) -> None:
        """A batch that had the link to itself was answered after so long. A hiccup, a kernel that
        was compiled, counts as twice what was expected: a slower link is believed soon enough."""
        if self._trips.known:
            seconds = min(seconds, 2 * self._trips.at(bits) + HICCUP_SECONDS)
        self._trips.add(bits, seconds)

    def says(self, seconds: float) -> None:
        """So long a token takes, says the target (0: unknown). It counts until some have come."""
        self._told = seconds

    def drew(self, seconds: float) -> None:
        """A token of the target's own came so long after the one before it; see `travelled`."""
        if self._own:
            seconds = min(seconds, 2 * self._own + HICCUP_SECONDS)
        self._own = _blend(self._own, seconds)

    def heard(self, tested: int, stood: int) -> None:
        """So many guesses were tested."""
        self._tested = WEIGHT * self._tested + tested
        self._stood = WEIGHT * self._stood + stood

    def next(self) -> Pace:
        """For a target that waits, or soon will."""
        if not self._trips.known:
            return Pace(min(FIRST_GUESSES, self._longest))
        length, rate = self._length()
        if length == 0:  # what was dear once is tried again, or nothing would ever tell
            self._draft *= 0.9
        if self._thrift < 1 and not self.own_seconds:
            return Pace(length, FIRST_ALONE)
        if self.own_seconds and (1 - self._thrift) / self.own_seconds > rate:
            # Twice what it draws in a round trip: it is asked again when half of it has come.
            run = math.ceil(2 * self.round_trip / self.own_seconds)
            return Pace(0, min(MOST_ALONE, max(LEAST_ALONE, run)))
        return Pace(length)

    @property
    def own_seconds(self) -> float:
        """Of a token of the target's own; 0 while that is not known."""
        return self._own or self._told

    @property
    def lead(self) -> int:
        """So many tokens before a run of the target's own ends it is to be asked for the next."""
        if not self.own_seconds:
            return 0
        return min(MOST_ALONE // 2, math.ceil(self.round_trip / self.own_seconds) + 1)

    def ahead(self, guessed: int) -> int:
        """Guesses to add behind ``guessed`` that are on their way, 0: wait."""
        if not self._trips.known or self._length()[0] == 0:
            return 0
        # No more than the link carries, or the device drafts, until the first is answered; the
        # first to be added stands behind a guess at what comes after those on their way.
        seconds = max(self._draft, self._guess_bits * self._trips.slope)
        room = self._trips.at(self._guess_bits) / seconds if seconds > 0 else math.inf
        places = np.arange(guessed, guessed + self._longest)
        wanted = (places < room) & (self.acceptance ** (places + 1) >= self._thrift)
        return int(wanted.sum())

    def _length(self) -> tuple[int, float]:
        """Guesses of a batch that is waited for, and the tokens per second that it brings."""
        guess = self._draft + self._guess_bits * self._trips.slope
        counts = np.arange(self._longest + 1)
        rates = np.cumsum(self.acceptance**counts) / (counts * guess + self.round_trip)
        return int(rates.argmax()), float(rates.max())


class _Line:
    """Seconds by bits: least squares, in which the past fades."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, x, y, x x and x y

    @property
    def known(self) -> bool:
        return bool(self._sums[0])

    def add(self, x: float, y: float) -> None:
        self._sums = WEIGHT * self._sums + (1, x, y, x * x, x * y)

    @property
    def slope(self) -> float:
        weight, xs, ys, xx, xy = self._sums.tolist()
        spread = weight * xx - xs * xs
        if spread <= 1e-9 * max(1.0, weight * xx):  # all of one size
            return 0.0
        return max(0.0, (weight * xy - xs * ys) / spread)

    def at(self, x: float) -> float:
        weight, xs, ys, *_ = self._sums.tolist()
        return max(0.0, (ys - self.slope * xs) / weight + self.slope * x) if weight else 0.0


def _blend(before: float, new: float) -> float:
    return new if before == 0.0 else 0.8 * before + 0.2 * new
