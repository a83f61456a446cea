"""Which screens are not worth a try for a while: those that left too much or found nothing."""

from __future__ import annotations

# A screen that leaves more than this share of the vocabulary, on a moving average, does not pay:
# refining and rescoring what is left costs more than a more precise screen would.
LARGEST_AVERAGE = 1.0 / 16.0
WEIGHT_OF_LAST = 1.0 / 8.0
# Of rows that draw from their nucleus, where bounds cost half of what every logit does.
LARGEST_UNCERTAIN = 0.5
# How many steps stay away from what has failed, doubling while it goes on failing.
SHORTEST_BACKOFF = 32
LONGEST_BACKOFF = 2048


class Backoff:
    """What is not worth trying for a while, by how often it failed lately."""

    def __init__(self) -> None:
        self._length: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def allows(self, name: str) -> bool:
        """Whether ``name`` is worth a try now; counts down its backoff otherwise."""
        left = self._left.get(name, 0)
        if left:
            self._left[name] = left - 1
        return left == 0

    def record(self, name: str, *, failed: bool) -> None:
        """A try of ``name`` has failed or not: failures in a row make its backoff ever longer."""
        if not failed:
            self._length.pop(name, None)
            return
        length = min(2 * self._length.get(name, SHORTEST_BACKOFF // 2), LONGEST_BACKOFF)
        self._length[name] = self._left[name] = length


class ShareLeft:
    """How large a share what is tried has left lately, by name: too much beyond ``largest``."""

    def __init__(self, largest: float) -> None:
        self._largest = largest
        self._average: dict[str, float] = {}

    def record(self, name: str, share: float) -> bool:
        """Whether ``name`` leaves too much, now that it has left ``share``."""
        average = self._average.get(name, 0.0)
        average += WEIGHT_OF_LAST * (share - average)
        too_much = average > self._largest
        self._average[name] = 0.0 if too_much else average
        return too_much
