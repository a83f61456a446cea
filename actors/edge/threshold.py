"""The threshold below which a drafted distribution's tokens are dropped, by online conformal
control (C-SQS, equation 8 and algorithm 1); docs/edge.md says where the paper's bound is wrong.

What is kept may go below 0, to ``-eta (1 - alpha)``, for there nothing is dropped: a clamp would
give back what is never paid. What is used is at least 0. Above 1, where it would only save up what
may be dropped later, it is clamped.
"""

from __future__ import annotations


class ConformalThreshold:
    """A token that drops more mass than ``alpha`` lowers it, one that drops less raises it, by the
    rate ``eta``: so tokens that the verifier heard of drop ``alpha`` at most on the average. It
    begins with ``first``. Raises ValueError for values that bound nothing."""

    def __init__(self, alpha: float, eta: float, first: float) -> None:
        if not 0 < alpha < 1 or not 0 < eta < float("inf") or not 0 <= first <= 1:
            raise ValueError(
                f"alpha {alpha} must be between 0 and 1, eta {eta} above 0, and the first "
                f"threshold {first} from 0 to 1"
            )
        self._alpha, self._eta, self._first = alpha, eta, first
        self._states = [first]  # of the tokens on their way, and of the next one
        self._dropped: list[float] = []  # by the tokens on their way
        self.tokens = 0  # that the verifier has heard of
        self.dropped = 0.0  # by them, in all

    @property
    def value(self) -> float:
        """Tokens less likely than this are dropped of the next distribution."""
        return max(0.0, self._states[-1])

    def drafted(self, dropped: float) -> None:
        """A token was drafted with `value`, which dropped so much; none at a threshold of 0."""
        self._dropped.append(dropped)
        self._states.append(min(1.0, self._states[-1] - self._eta * (dropped - self._alpha)))

    def heard(self, used: int, *, goes_on: bool = False) -> None:
        """Of the tokens that were drafted, ``used`` have been said, as they were guessed or, the
        last one, otherwise. What was drafted behind them ``goes_on``, or never was."""
        used = min(used, len(self._dropped))
        self.tokens += used
        self.dropped += sum(self._dropped[:used])
        del self._states[:used], self._dropped[:used]
        if not goes_on:
            del self._states[1:], self._dropped[:]

    @property
    def average(self) -> float:
        """The mass that tokens dropped on the average."""
        return self.dropped / max(1, self.tokens)

    @property
    def bound(self) -> float:
        """What `average` cannot exceed, whatever the distributions are."""
        spent = self._first + self._eta * (1 - self._alpha)
        return self._alpha + spent / (self._eta * max(1, self.tokens))
