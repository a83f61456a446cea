"""How much is guessed for a thin link: what saves waiting for what it costs.

A batch of ``k`` guesses takes ``k`` drafts and the bits of ``k`` guesses, then one round trip; of
guesses that stand with probability ``a`` each it brings ``(1 - a^(k+1)) / (1 - a)`` tokens. The
length with the most tokens per second is taken, none where guesses do not pay: then the target is
asked for a token. While a batch travels, guesses go on behind it as long as it is likely enough
that all before them stand: what is drafted in vain costs energy, and bits.
"""

from __future__ import annotations

import math

WEIGHT = 0.97  # of what was measured before, each time
LEAST_LIKELY, MOST_LIKELY = 0.02, 0.995  # that a guess stands: one never knows
FIRST_ACCEPTANCE = 0.7


class DraftPace:
    """Learns what drafting, sending and waiting cost on this link, and what guesses are worth.

    ``thrift`` is how likely a guess must be to be of use, from 0 (whatever saves time) to 1 (none
    beyond the batch that is waited for). A batch has ``longest`` guesses at most. All are seconds.
    """

    def __init__(self, *, longest: int, thrift: float) -> None:
        self._longest = longest
        self._thrift = thrift
        self._tested = self._stood = 0.0
        self._draft = 0.0  # of one guess
        self._trips = _Line()  # by the bits of a batch
        self._guess_bits = 0.0

    @property
    def acceptance(self) -> float:
        """How likely the next guess is to stand."""
        prior = 4.0  # guesses
        share = (self._stood + prior * FIRST_ACCEPTANCE) / (self._tested + prior)
        return min(MOST_LIKELY, max(LEAST_LIKELY, share))

    @property
    def round_trip(self) -> float:
        """From sending an empty batch to its verdict."""
        return self._trips.at(0.0)

    def drafted(self, guesses: int, seconds: float, bits: int) -> None:
        """Drafting took so long, and makes a batch of so many bits."""
        self._draft = _blend(self._draft, seconds / guesses)
        self._guess_bits = _blend(self._guess_bits, bits / guesses)

    def travelled(self, bits: int, seconds: float) -> None:
        """A batch that had the link to itself was answered after so long."""
        self._trips.add(bits, seconds)

    def heard(self, tested: int, stood: int) -> None:
        """So many guesses were tested."""
        self._tested = WEIGHT * self._tested + tested
        self._stood = WEIGHT * self._stood + stood

    def length(self) -> int:
        """Guesses of a batch that is waited for."""
        if not self._trips.known:
            return min(4, self._longest)
        guess = self._draft + self._guess_bits * self._trips.slope
        best, best_rate = 0, 1.0 / max(self.round_trip, 1e-9)
        share, tokens = self.acceptance, 1.0
        for count in range(1, self._longest + 1):
            tokens += share**count
            rate = tokens / (count * guess + max(self.round_trip, 1e-9))
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def ahead(self, guessed: int) -> int:
        """Guesses to add behind ``guessed`` that are on their way, 0: wait."""
        if not self._trips.known or self.length() == 0:
            return 0
        # The one after the last guess is guessed, too; and there is no use in more than the link
        # carries, or the device drafts, until the first is answered.
        seconds = max(self._draft, self._guess_bits * self._trips.slope)
        room = self._trips.at(self._guess_bits) / seconds if seconds > 0 else math.inf
        likely = self.acceptance ** (guessed + 1)
        count = 0
        while count < self._longest and guessed + count < room and likely >= self._thrift:
            count += 1
            likely *= self.acceptance
        return count


class _Line:
    """Seconds by bits: least squares, in which the past fades."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def add(self, x: float, y: float) -> None:
        self._weight = WEIGHT * self._weight + 1
        self._x = WEIGHT * self._x + x
        self._y = WEIGHT * self._y + y
        self._xx = WEIGHT * self._xx + x * x
        self._xy = WEIGHT * self._xy + x * y

    @property
    def slope(self) -> float:
        spread = self._weight * self._xx - self._x * self._x
        if spread <= 1e-9 * max(1.0, self._weight * self._xx):  # all of one size
            return 0.0
        return max(0.0, (self._weight * self._xy - self._x * self._y) / spread)

    def at(self, x: float) -> float:
        if not self._weight:
            return 0.0
        return max(0.0, (self._y - self.slope * self._x) / self._weight + self.slope * x)


def _blend(before: float, new: float) -> float:
    return new if before == 0.0 else 0.8 * before + 0.2 * new
