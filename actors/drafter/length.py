"""How many tokens to guess for each sequence: rules that learn from what became of guesses.

Where guesses are verified by what the target draws, they decide when tokens come, never which, and
may go by the clock. Where guesses are tested by distributions, tokens depend on their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.acceptance_history import AcceptanceHistory
from lexshard.actors.drafter.cost_curve import CostCurve

# How much faster guessing must promise to be, to go on and to begin. Costs are known to some
# percent only, and the best of many lengths is the one with the luckiest estimate.
LEAST_GAIN, FIRST_GAIN = 1.1, 1.15
# With what the papers' rule begins.
FIRST_LENGTH = 3
# Steps with the same sequences for which lengths are kept, at least; many sequences take longer to
# decide for, and keep theirs for as many steps as there are of them, and where nothing is guessed
# for so many times as many.
KEPT_STEPS, KEPT_RESTING = 8, 4
# After so many decisions the next is one guess more or less than the best, for so many steps: what
# is never done is never known to have become cheap.
TRIAL_EVERY, TRIAL_STEPS = 16, 2
# So often, and soon after the first, it is none, for so many, which come in runs: plain steps are
# what all is compared with.
PLAIN_EVERY, PLAIN_STEPS, FIRST_PLAIN = 64, 16, (4, 20)


class LengthRule(Protocol):
    def lengths(
        self, sequences: Sequence[int], rooms: Sequence[int], greedy: Collection[int] = ()
    ) -> list[int]:
        """How many tokens to guess for each of the sequences of a step, at most its room. Of these
        some are ``greedy``, and others draw."""

    @property
    def resting(self) -> int:
        """For how many more steps of the sequences that `lengths` was asked about last nothing will
        be guessed. They need not be asked about: `rest` tells that they went by."""

    def rest(self, steps: int) -> None:
        """So many steps went by without being asked about."""

    def heard(self, sequence: int, drafted: int, stood: int) -> None:
        """``stood`` of the ``drafted`` guesses for a sequence stood in a step; of 0 its drafter had
        none."""

    def drafting_took(self, sequences: int, depth: int, seconds: float) -> None:
        """So many guesses one after the other, perhaps none, for so many sequences at once."""

    def beginning_took(self, sequences: int, seconds: float) -> None:
        """The first guesses for so many sequences, whose tokens the drafter had to read first."""

    def step_took(self, rows: int, seconds: float, steps: int = 1) -> None:
        """A step of so many rows, guesses among them, each of which drew a token; or each of some
        ``steps`` of a run."""

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""


class FixedLength:
    """Always as many."""

    resting = 0  # it always guesses

    def __init__(self, most: int) -> None:
        self._most = most

    def rest(self, steps: int) -> None: ...

    def lengths(
        self, sequences: Sequence[int], rooms: Sequence[int], greedy: Collection[int] = ()
    ) -> list[int]:
        return [min(self._most, room) for room in rooms]

    def heard(self, sequence: int, drafted: int, stood: int) -> None: ...
    def drafting_took(self, sequences: int, depth: int, seconds: float) -> None: ...
    def beginning_took(self, sequences: int, seconds: float) -> None: ...
    def step_took(self, rows: int, seconds: float, steps: int = 1) -> None: ...
    def forget(self, sequence: int) -> None: ...


class SteppingLength(FixedLength):
    """The papers' rule: two more after a step in which all guesses stood, one less after another,
    never fewer than one (Optimized Speculative Sampling, section 4; transformers' heuristic)."""

    def __init__(self, most: int, first: int) -> None:
        super().__init__(most)
        self._first = min(first, most)
        self._lengths: dict[int, int] = {}

    def lengths(
        self, sequences: Sequence[int], rooms: Sequence[int], greedy: Collection[int] = ()
    ) -> list[int]:
        wanted = (self._lengths.get(sequence, self._first) for sequence in sequences)
        return [min(length, room) for length, room in zip(wanted, rooms, strict=True)]

    def heard(self, sequence: int, drafted: int, stood: int) -> None:
        length = self._lengths.get(sequence, self._first)
        if drafted < length:  # there was no room for more: nothing is learnt
            return
        length = length + 2 if stood == drafted else length - 1
        self._lengths[sequence] = max(1, min(length, self._most))

    def forget(self, sequence: int) -> None:
        self._lengths.pop(sequence, None)


class MeasuredLength:
    """As many as give most tokens a second, by what guesses have come to and what steps have cost.

    A guess is a row more in the step, and stands if all before it do. Of the guesses that could be
    made those are taken that stand most likely; one more as long as it pays. None where none does,
    nor where what is left to say is not worth that the drafter reads what has been said.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._history = AcceptanceHistory()
        self._step = CostCurve()
        self._draft_step = CostCurve()
        self._beginning = CostCurve()
        self._decided: dict[int, int] = {}
        self._steps, self._steps_left = 0, 0  # since the last decision and until the next
        self._decisions = 0
        self._pays = False  # by the last decision that was no trial

    def lengths(
        self, sequences: Sequence[int], rooms: Sequence[int], greedy: Collection[int] = ()
    ) -> list[int]:
        if not self._steps_left or self._decided.keys() != set(sequences):
            resting = [each for each, length in self._decided.items() if not length]
            others = self._decided.keys() - resting
            self._history.pause(resting, self._steps, others)
            for sequence in sequences:
                self._history.meet(sequence, greedy=sequence in greedy)
            self._decide(sequences, rooms)
            self._decisions += 1
            kept = max(KEPT_STEPS, len(sequences))
            if not any(self._decided.values()):
                kept *= KEPT_RESTING
            self._steps, self._steps_left = 0, kept
            if self._pays:
                self._perhaps_try_another()
        self._steps += 1
        self._steps_left -= 1
        decided = map(self._decided.__getitem__, sequences)
        return [min(length, room) for length, room in zip(decided, rooms, strict=True)]

    @property
    def resting(self) -> int:
        return 0 if any(self._decided.values()) else self._steps_left

    def rest(self, steps: int) -> None:
        self._steps += steps
        self._steps_left -= steps

    def _decide(self, sequences: Sequence[int], rooms: Sequence[int]) -> None:
        acceptance = list(map(self._history.of, sequences))
        guessed = list(map(self._history.guessed, sequences))
        if self._step and self._draft_step:
            gain = LEAST_GAIN if self._pays else self._first_gain(rooms)
            costs = self._step, self._draft_step
            lengths = best_lengths(acceptance, self._most, *costs, gain, guessed)
        else:
            lengths = [min(2, self._most)] * len(sequences)  # there is something to be learnt
        self._decided = dict(zip(sequences, lengths, strict=True))
        self._pays = any(lengths)

    def _first_gain(self, rooms: Sequence[int]) -> float:
        """The gain with which the sequences earn in what they are likely to say yet, half of what
        they may, what it costs to begin with them."""
        if not self._beginning:
            return FIRST_GAIN
        plain = self._step.estimate(len(rooms)) / len(rooms) * sum(rooms) / 2
        left = plain - self._beginning.estimate(len(rooms))
        return FIRST_GAIN * plain / left if left > 0 else math.inf

    def _perhaps_try_another(self) -> None:
        """Now and then none; one more and one less by turns, for those that are guessed for."""
        if self._decisions % PLAIN_EVERY == 0 or self._decisions in FIRST_PLAIN:
            self._steps_left = PLAIN_STEPS
            self._decided = dict.fromkeys(self._decided, 0)
        elif self._decisions % TRIAL_EVERY == 0:
            self._steps_left = TRIAL_STEPS
            shift = 1 if self._decisions % (2 * TRIAL_EVERY) else -1
            for sequence, length in self._decided.items():
                if length:
                    self._decided[sequence] = min(max(length + shift, 1), self._most)

    def heard(self, sequence: int, drafted: int, stood: int) -> None:
        self._history.add(sequence, drafted, stood)

    def drafting_took(self, sequences: int, depth: int, seconds: float) -> None:
        if depth or not self._draft_step:  # to have nothing to say is quick
            self._draft_step.observe(sequences, seconds / max(1, depth))

    def beginning_took(self, sequences: int, seconds: float) -> None:
        self._beginning.observe(sequences, seconds)

    def step_took(self, rows: int, seconds: float, steps: int = 1) -> None:
        self._step.observe(rows, seconds, steps)

    def forget(self, sequence: int) -> None:
        self._history.forget(sequence)


def best_lengths(
    acceptance: Sequence[float],
    most: int,
    step: CostCurve,
    draft_step: CostCurve,
    gain: float = LEAST_GAIN,
    guessed: Sequence[float] = (),
) -> list[int]:
    """The lengths of drafts, up to ``most``, that give most tokens per second; none where that is
    not ``gain`` times what plain steps give.

    A guess for a sequence of ``acceptance`` a, whose drafter has guesses in a share g of steps (in
    all, where ``guessed`` is not given), is the n-th to stand with probability g a^n. A step of
    as many sequences and guesses together costs what ``step`` says, each of the drafter's steps
    what ``draft_step`` says of as many sequences.
    """
    count = len(acceptance)
    best = [0] * count
    most_per_second = gain * count / step.estimate(count)
    step_seconds = [step.estimate(count + guesses) for guesses in range(count * most + 1)]
    draft_seconds = draft_step.estimate(count)
    firsts = [a * g for a, g in zip(acceptance, guessed or [1.0] * count, strict=True)]
    for depth in range(1, most + 1):
        lengths = [0] * count
        tokens = float(count)
        # In order of probability: of a sequence's guesses the first comes first.
        likely = [(-first, index) for index, first in enumerate(firsts)]
        heapify(likely)
        for guesses in range(1, count * depth + 1):
            probability, index = likely[0]
            lengths[index] += 1
            tokens -= probability
            per_second = tokens / (step_seconds[guesses] + depth * draft_seconds)
            if per_second > most_per_second:
                most_per_second = per_second
                best = lengths.copy()
            if lengths[index] < depth:
                heapreplace(likely, (probability * acceptance[index], index))
            else:
                heappop(likely)
    return best


def length_rule(configuration: EngineConfiguration, *, by_distribution: bool) -> LengthRule:
    """A new rule, which has learnt nothing; not by the clock where guesses are tested
    ``by_distribution``: there, tokens depend on lengths."""
    most, chosen = configuration.draft_tokens, configuration.draft_length
    if chosen == "fixed":
        return FixedLength(most)
    if chosen == "stepping" or by_distribution:
        return SteppingLength(most, FIRST_LENGTH)
    return MeasuredLength(most)
