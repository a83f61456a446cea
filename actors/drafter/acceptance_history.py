"""How often there are guesses for each sequence, and how often they stand."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Guesses that a new sequence, and the first of all, is taken to have been tested with, and steps in
# which there were some. Of the first much is hoped: what is never tried shows nothing, and a few
# steps tell.
PRIOR_GUESSES, PRIOR_STEPS = 4.0, 1.0
FIRST_ACCEPTANCE = 0.85
# What is left of a tested guess's weight after another one, and after a step without any: who is
# not tried is forgotten, and so tried again.
KEPT_PER_GUESS, KEPT_PER_PAUSE = 0.97, 0.97
KEPT_OF_ALL = 0.998


@dataclass(slots=True)
class _Share:
    """``stood`` of ``tested`` guesses, the older of which count less."""

    stood: float = 0.0
    tested: float = 0.0

    def add(self, tested: int, stood: int, kept: float) -> None:
        left = kept**tested
        self.tested = left * self.tested + tested
        self.stood = left * self.stood + stood

    def fade(self, kept: float) -> None:
        self.tested *= kept
        self.stood *= kept

    def mean(self, prior: float, weight: float) -> float:
        return (self.stood + prior * weight) / (self.tested + weight)


class AcceptanceHistory:
    """The share of tested guesses that stood, by sequence and over all that write greedily, and all
    that draw: what is likeliest is easier to guess than what is drawn.

    A guess is tested if all before it stood. A sequence with few of them is taken for an average
    one of its kind.
    """

    def __init__(self) -> None:
        self._all = {True: _Share(), False: _Share()}  # of greedy sequences, and of others
        self._shares: dict[int, _Share] = {}
        self._guessed: dict[int, _Share] = {}  # steps in which there were guesses, of all
        self._greedy: set[int] = set()

    def meet(self, sequence: int, *, greedy: bool) -> None:
        """What kind a sequence is of, before anything is known of it; else it draws."""
        if greedy:
            self._greedy.add(sequence)

    def add(self, sequence: int, drafted: int, stood: int) -> None:
        """``stood`` of ``drafted`` guesses of a step stood, the first ones; perhaps its drafter had
        none."""
        tested = min(drafted, stood + 1)
        self._all[sequence in self._greedy].add(tested, stood, KEPT_OF_ALL)
        self._shares.setdefault(sequence, _Share()).add(tested, stood, KEPT_PER_GUESS)
        self._guessed.setdefault(sequence, _Share()).add(1, min(drafted, 1), KEPT_PER_GUESS)

    def pause(self, sequences: Collection[int], steps: int, others: Collection[int] = ()) -> None:
        """So many ``steps`` went by in which nothing was guessed for ``sequences``, but for
        ``others``. What is known of a kind is forgotten only where nothing was guessed for any of
        it, and by the step, however many sequences there are: to try again costs each of them what
        was written meanwhile."""
        for sequence in sequences:
            if sequence in self._shares:
                self._shares[sequence].fade(KEPT_PER_PAUSE**steps)
                self._guessed[sequence].fade(KEPT_PER_PAUSE**steps)
        paused = {each in self._greedy for each in sequences}
        for kind in paused - {each in self._greedy for each in others}:
            self._all[kind].fade(KEPT_OF_ALL**steps)

    def of(self, sequence: int) -> float:
        average = self._all[sequence in self._greedy].mean(FIRST_ACCEPTANCE, PRIOR_GUESSES)
        share = self._shares.get(sequence)
        return average if share is None else share.mean(average, PRIOR_GUESSES)

    def guessed(self, sequence: int) -> float:
        """In what share of steps its drafter has guesses."""
        share = self._guessed.get(sequence)
        return 1.0 if share is None else share.mean(1.0, PRIOR_STEPS)

    def forget(self, sequence: int) -> None:
        self._shares.pop(sequence, None)
        self._guessed.pop(sequence, None)
        self._greedy.discard(sequence)
