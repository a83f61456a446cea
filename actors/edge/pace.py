"""How much is guessed over a thin link, or drawn alone: whatever brings more tokens per second.

A batch of ``k`` guesses takes ``k`` drafts and the bits of ``k`` guesses, then one round trip; of
guesses that stand with probability ``a`` each it brings ``(1 - a^(k+1)) / (1 - a)`` tokens. While a
batch travels, guesses go on behind it as long as it is likely enough that all before them stand.
To a target that draws alone round trips are nothing: it is asked for more before it stops.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, linear_regression
from typing import NamedTuple

import numpy as np

WEIGHT = 0.97  # of what was measured before, each time
FIRST_ACCEPTANCE, PRIOR_GUESSES = 0.7, 4.0
FIRST_ALONE = 64  # tokens of a run, while nothing is known
TRIPS = 32  # that are remembered
HICCUP_SECONDS = 0.02
LEAST_ALONE, MOST_ALONE = 8, 128  # tokens of a run


class Pace(NamedTuple):
    """So many guesses, then so many tokens of the target's own."""

    guesses: int
    alone: int = 0


class DraftPace:
    """Learns what drafting, sending and waiting cost on a link, in seconds, `connected` first, and
    what guesses are worth. A batch has ``longest`` at most. ``thrift`` is how likely one must be to
    be drafted ahead, and by which part a target that draws alone must be the quicker: 0 saves time,
    1 energy."""

    def __init__(self, *, longest: int, thrift: float) -> None:
        self._longest = longest
        self._thrift = thrift
        self._tested = self._stood = 0.0
        self._draft = 0.0  # of one guess
        self._guess_bits = 0.0
        self._trips = _Trips(maxlen=TRIPS)
        self.own_seconds = 0.0  # of a token of the target's own; 0 while that is not known

    @property
    def acceptance(self) -> float:
        """How likely the next guess is to stand."""
        return (self._stood + PRIOR_GUESSES * FIRST_ACCEPTANCE) / (self._tested + PRIOR_GUESSES)

    @property
    def round_trip(self) -> float:
        """From sending an empty batch to its verdict."""
        return max(1e-9, self._trips.seconds(0.0))

    def drafted(self, guesses: int, seconds: float, bits: int) -> None:
        """Drafting took so long, and makes a batch of so many bits."""
        self._draft = _blend(self._draft, seconds / guesses)
        self._guess_bits = _blend(self._guess_bits, bits / guesses)

    def connected(self, seconds: float) -> None:
        """A connection took so long: the first that is heard of the way."""
        if not self._trips:
            self._trips.append((0.0, seconds))

    def travelled(self, bits: int, seconds: float) -> None:
        """A batch that had the link to itself was answered after so long. A hiccup, a kernel that
        was compiled, counts as twice what was expected: a slower link is believed soon enough."""
        most = 2 * self._trips.seconds(bits) + HICCUP_SECONDS
        self._trips.append((bits, min(seconds, most)))

    def drew(self, seconds: float) -> None:
        """A token of the target's own came so long after the one before it; see `travelled`. What
        is known of guesses fades: where they did not pay, they are tried again."""
        if self.own_seconds:
            seconds = min(seconds, 2 * self.own_seconds + HICCUP_SECONDS)
        self.own_seconds = _blend(self.own_seconds, seconds)
        self.heard(0, 0)

    def heard(self, tested: int, stood: int) -> None:
        """So many guesses were tested."""
        self._tested = WEIGHT * self._tested + tested
        self._stood = WEIGHT * self._stood + stood

    def next(self) -> Pace:
        """For a target that waits, or soon will."""
        length, rate = self._length()
        if length == 0:  # what was dear once is tried again, or nothing would ever tell
            self._draft *= 0.9
        if self.run and (not self.own_seconds or (1 - self._thrift) / self.own_seconds > rate):
            return Pace(0, self.run)
        return Pace(length)

    @property
    def run(self) -> int:
        """Tokens that a target which draws alone is asked for at once; 0: it never is."""
        if self._thrift == 1:
            return 0
        if not self.own_seconds:
            return FIRST_ALONE
        # Twice what it draws in a round trip: it is asked again when half of it has come.
        run = math.ceil(2 * self.round_trip / self.own_seconds)
        return min(MOST_ALONE, max(LEAST_ALONE, run))

    @property
    def lead(self) -> int:
        """So many tokens before a run of the target's own ends it is to be asked for the next."""
        if not self.own_seconds:
            return 0
        return min(MOST_ALONE // 2, math.ceil(self.round_trip / self.own_seconds) + 1)

    def ahead(self, guessed: int) -> int:
        """Guesses to add behind ``guessed`` that are on their way, 0: wait."""
        if self._length()[0] == 0:
            return 0
        # No more than the link carries, or the device drafts, until the first is answered; the
        # first to be added stands behind a guess at what comes after those on their way.
        seconds = max(self._draft, self._guess_bits * self._trips.bit_seconds)
        room = self._trips.seconds(self._guess_bits) / seconds if seconds > 0 else math.inf
        places = np.arange(guessed, guessed + self._longest)
        wanted = (places < room) & (self.acceptance ** (places + 1) >= self._thrift)
        return int(wanted.sum())

    def _length(self) -> tuple[int, float]:
        """Guesses of a batch that is waited for, and the tokens per second that it brings."""
        guess = self._draft + self._guess_bits * self._trips.bit_seconds
        counts = np.arange(self._longest + 1)
        rates = np.cumsum(self.acceptance**counts) / (counts * guess + self.round_trip)
        return int(rates.argmax()), float(rates.max())


class _Trips(deque[tuple[float, float]]):
    """The bits and seconds of the last ones, on a line by least squares."""

    @property
    def bit_seconds(self) -> float:
        bits, seconds = zip(*self, strict=True)
        if min(bits) == max(bits):  # which tell nothing of it
            return 0.0
        return max(0.0, linear_regression(bits, seconds).slope)

    def seconds(self, bits: float) -> float:
        """Of a batch of so many."""
        mean_bits, mean_seconds = map(fmean, zip(*self, strict=True))
        return max(0.0, mean_seconds + self.bit_seconds * (bits - mean_bits))


def _blend(before: float, new: float) -> float:
    return new if before == 0.0 else 0.8 * before + 0.2 * new
