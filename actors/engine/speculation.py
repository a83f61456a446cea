"""Guesses in the engine: who is drafted for, and what becomes of it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from lexshard.actors.drafter.length import LengthRule
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.kernels.ahead import GUESSING, is_postponed


@dataclass(frozen=True, slots=True)
class CostTiming:
    """What a draft of ``depth`` guesses, the beginning of one or a step took once, or each of
    ``steps`` of a run: for ``size`` sequences, or with so many rows."""

    of: Literal["drafting", "beginning", "step"]
    size: int
    seconds: float
    depth: int = 1
    steps: int = 1


def _median(timings: list[CostTiming]) -> CostTiming:
    """Of several of the same, by the steps of each."""
    ordered = sorted(timings, key=lambda each: each.seconds)
    counts = list(accumulate(each.steps for each in ordered))
    middle = ordered[bisect_left(counts, counts[-1] / 2)]
    return replace(middle, steps=len(timings))


class Speculation:
    """Gives sequences the guesses of ``drafter``, as many as a rule says, and tells the rule what
    they came to. ``make_rule`` makes one for the sequences whose guesses are tested by
    distributions (True), one for the others. ``forced_length``, where it is set, is how many
    guesses every sequence gets. While what guesses is postponed (`kernels.ahead`), only those get
    any whose tokens depend on them: which are tested by distributions.
    """

    def __init__(self, drafter: Drafter, make_rule: Callable[[bool], LengthRule]) -> None:
        self.forced_length: int | None = None
        self._drafter = drafter
        self._make_rule = make_rule
        self._rules = make_rule(False), make_rule(True)
        self._drafted: Collection[int] = ()  # in the step before
        # The sequences for which nothing is guessed, for so many steps more, and since how many.
        self._resting_for: set[Sequence] = set()
        self._rests, self._rested = 0, 0
        self._timings: list[CostTiming] = []  # while everyone gets so many guesses

    @property
    def drafter_name(self) -> str:
        return self._drafter.name

    @property
    def timings(self) -> list[CostTiming]:
        """What has been measured while everyone got `forced_length` guesses: of what was done
        several times the median, as the first time may load a kernel."""
        alike: dict[tuple[object, ...], list[CostTiming]] = {}
        for each in self._timings:
            alike.setdefault((each.of, each.size, each.depth), []).append(each)
        return [_median(each) for each in alike.values()]

    def restart(self, timings: Sequenced[CostTiming] = ()) -> None:
        """Forgets what has been measured, and takes ``timings`` for that."""
        self._rules = self._make_rule(False), self._make_rule(True)
        self._rests, self._rested = 0, 0
        self._timings = []
        for timing in timings:
            self._took(timing)

    def _took(self, timing: CostTiming) -> None:
        if self.forced_length is not None:
            self._timings.append(timing)
        for rule in self._rules:
            if timing.of == "step":
                rule.step_took(timing.size, timing.seconds, timing.steps)
            elif timing.of == "beginning":
                rule.beginning_took(timing.size, timing.seconds)
            else:
                rule.drafting_took(timing.size, timing.depth, timing.seconds)

    def draft(self, drawing: list[Sequence], counters: Counters) -> None:
        """Guesses for the sequences that draw next and have no other drafter."""
        if self._rests and self.forced_length is None and self._resting_for == {*drawing}:
            self._rests -= 1
            self._rested += 1
            return
        started = time.perf_counter()
        asked = drawing
        drawing = [each for each in drawing if self._guesses_for(each)]
        if not drawing:
            return
        lengths = self._lengths(drawing)
        self._resting_for = {*asked}
        if any(each not in lengths and self._drafts_for(each) for each in asked):
            self._rests = 0  # the next step may begin to guess for it
        chosen = []
        tasks = []
        for sequence in drawing:
            sequence.forget_guesses()
            length = lengths[sequence]
            if length:
                chosen.append(sequence)
                tasks.append(
                    DraftTask.of(
                        sequence.arrival,
                        sequence.state,
                        sequence.token_ids,
                        length,
                        propose=sequence.tests_guesses,
                    )
                )
        if tasks:
            self._ask(chosen, tasks)
        else:
            self._drafted = ()
        counters.draft_seconds += time.perf_counter() - started

    def steps_without(self, drawing: list[Sequence]) -> int | None:
        """For how many steps from this one on nothing is guessed for ``drawing``, which it has been
        asked about; None: for ever."""
        if self.forced_length == 0 or not any(map(self._drafts_for, drawing)):
            return None
        return 1 + self._rests if self._resting_for == {*drawing} else 1

    def _guesses_for(self, sequence: Sequence) -> bool:
        """Now. A first token is no tested guess: where a step ends within its prompt would say."""
        first = sequence.tests_guesses and not sequence.output_length
        return not first and self._drafts_for(sequence)

    def _drafts_for(self, sequence: Sequence) -> bool:
        if sequence.drafter != "engine" or sequence.request.drafting.most == 0:
            return False
        if is_postponed(GUESSING) and not sequence.tests_guesses:
            return False
        return sequence.verify != "greedy" or sequence.state.inverse_temperature == 0

    def _lengths(self, drawing: list[Sequence]) -> dict[Sequence, int]:
        """How many guesses each sequence gets, at most what it has room for."""
        if self.forced_length is not None:
            return {sequence: min(self.forced_length, sequence.room) for sequence in drawing}
        lengths: dict[Sequence, int] = {}
        rests = []
        for tested, rule in enumerate(self._rules):
            own = [each for each in drawing if each.tests_guesses == bool(tested)]
            if own:
                names, rooms = [each.arrival for each in own], [each.room for each in own]
                rule.rest(self._rested)
                greedy = [each.arrival for each in own if not each.state.inverse_temperature]
                lengths.update(zip(own, rule.lengths(names, rooms, greedy), strict=True))
                rests.append(rule.resting)
        self._rests, self._rested = min(rests), 0
        return lengths

    def _ask(self, chosen: list[Sequence], tasks: list[DraftTask]) -> None:
        started = time.perf_counter()
        guesses = self._drafter.propose(tasks)
        seconds = time.perf_counter() - started
        depth = 0
        for sequence, task, guessed in zip(chosen, tasks, guesses, strict=True):
            sequence.drafted.extend(guessed.token_ids[: task.most])
            sequence.proposals = guessed.proposals
            depth = max(depth, len(sequence.drafted))
            if not (guessed.token_ids or guessed.reads):
                self._tested(sequence, 0, 0)
        names = {task.sequence for task in tasks}
        if names.isdisjoint(self._drafted):
            self._took(CostTiming("beginning", len(tasks), seconds))
        elif names.issubset(self._drafted) and not any(each.reads for each in guesses):
            self._took(CostTiming("drafting", len(tasks), seconds, depth))
        self._drafted = names

    def step_took(self, plan: StepPlan, seconds: float) -> None:
        """A step from its plan to its end. Of those in which nothing is guessed, some tell what all
        take."""
        if not self._rested and all(chunk.draws == chunk.count for chunk in plan.chunks):
            steps = plan.steps
            self._took(CostTiming("step", plan.tokens // steps, seconds / steps, steps=steps))
        if plan.steps > 1 and {chunk.sequence for chunk in plan.chunks} == self._resting_for:
            more = min(self._rests, plan.steps - 1)  # which it was not asked about
            self._rests -= more
            self._rested += more

    def heard(self, chunk: Chunk, drawn: int, stood: int) -> None:
        """So many tokens were drawn where ``chunk`` had guesses, ``stood`` of which stand."""
        # One that ended in the midst says nothing of the guesses after its end.
        tested = stood if stood == drawn else len(chunk.drafted)
        if tested:
            self._tested(chunk.sequence, tested, stood)

    def _tested(self, sequence: Sequence, guesses: int, stood: int) -> None:
        if self.forced_length is None:  # what is said to measure costs is no text
            self._rules[sequence.tests_guesses].heard(sequence.arrival, guesses, stood)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._drafter.forget(sequence.arrival)
        for rule in self._rules:
            rule.forget(sequence.arrival)
