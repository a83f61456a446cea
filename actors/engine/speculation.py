"""Guesses in the engine: who is drafted for, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from lexshard.actors.configuration import BY_DISTRIBUTION, VerifyMode
from lexshard.actors.drafter.length import LengthRule
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.engine.scheduler import Chunk, StepPlan
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.proposal import GuessTest, Proposal


@dataclass(frozen=True, slots=True)
class CostTiming:
    """What a draft of ``depth`` guesses, the beginning of one or a step took once: for ``size``
    sequences, or with so many rows."""

    of: Literal["drafting", "beginning", "step"]
    size: int
    seconds: float
    depth: int = 1


class Speculation:
    """Gives sequences the guesses of ``drafter``, as many as a rule of ``make_rule`` says, and
    tells the rule what they came to; ``verify`` says how they are tested. ``forced_length``, where
    it is set, is how many guesses everyone gets.
    """

    def __init__(
        self,
        drafter: Drafter,
        make_rule: Callable[[], LengthRule],
        verify: VerifyMode = "same-token",
    ) -> None:
        self.forced_length: int | None = None
        self._drafter = drafter
        self._make_rule = make_rule
        self._rule = make_rule()
        self._greedy = verify == "greedy"
        self._by_distribution = verify in BY_DISTRIBUTION
        self._exactly = verify == "same-distribution"
        self._drafted: Collection[int] = ()  # in the step before
        # Of each sequence what its last guesses were drawn from.
        self._proposals: dict[int, Sequenced[Proposal]] = {}
        self._timings: list[CostTiming] = []  # while everyone gets so many guesses

    @property
    def drafter_name(self) -> str:
        return self._drafter.name

    @property
    def timings(self) -> list[CostTiming]:
        """What has been measured while everyone got `forced_length` guesses."""
        return list(self._timings)

    def restart(self, timings: Sequenced[CostTiming] = ()) -> None:
        """Forgets what has been measured, and takes ``timings`` for that."""
        self._rule = self._make_rule()
        self._timings = []
        for timing in timings:
            self._took(timing)

    def _took(self, timing: CostTiming) -> None:
        if self.forced_length is not None:
            self._timings.append(timing)
        if timing.of == "step":
            self._rule.step_took(timing.size, timing.seconds)
        elif timing.of == "beginning":
            self._rule.beginning_took(timing.size, timing.seconds)
        else:
            self._rule.drafting_took(timing.size, timing.depth, timing.seconds)

    def draft(self, drawing: list[Sequence], counters: Counters) -> None:
        """Guesses for the sequences that draw next; none beyond what each may still say."""
        started = time.perf_counter()
        if self._greedy:
            drawing = [each for each in drawing if each.state.inverse_temperature == 0]
        if not drawing:
            return
        rooms = [
            max(0, sequence.request.parameters.max_tokens - sequence.output_length - 1)
            for sequence in drawing
        ]
        if self.forced_length is None:
            lengths = self._rule.lengths([sequence.arrival for sequence in drawing], rooms)
        else:
            lengths = [min(self.forced_length, room) for room in rooms]
        chosen = []
        tasks = []
        for sequence, length in zip(drawing, lengths, strict=True):
            sequence.drafted.clear()
            if length:
                state = sequence.state
                chosen.append(sequence)
                tasks.append(
                    DraftTask(
                        sequence.arrival,
                        sequence.token_ids,
                        length,
                        state.key,
                        state.inverse_temperature,
                        self._tests(sequence),
                        state.top_k,
                        state.parameters.top_p,
                        state.parameters.min_p,
                    )
                )
        if tasks:
            self._ask(chosen, tasks)
        else:
            self._drafted = ()
        counters.draft_seconds += time.perf_counter() - started

    def _ask(self, chosen: list[Sequence], tasks: list[DraftTask]) -> None:
        started = time.perf_counter()
        guesses = self._drafter.propose(tasks)
        seconds = time.perf_counter() - started
        depth = 0
        for sequence, task, guessed in zip(chosen, tasks, guesses, strict=True):
            sequence.drafted.extend(guessed.token_ids[: task.most])
            self._proposals[task.sequence] = guessed.proposals
            depth = max(depth, len(sequence.drafted))
        names = {task.sequence for task in tasks}
        if names.isdisjoint(self._drafted):
            self._took(CostTiming("beginning", len(tasks), seconds))
        elif depth and names.issubset(self._drafted):  # no prompt had to be read first
            self._took(CostTiming("drafting", len(tasks), seconds, depth))
        self._drafted = names

    def tests(self, chunk: Chunk) -> list[GuessTest]:
        """What the rows of ``chunk`` but the last test by distributions; none where they draw."""
        if not chunk.drafted or not self._tests(chunk.sequence):
            return []
        proposals = self._proposals[chunk.sequence.arrival] or repeat(None)
        return list(map(GuessTest, chunk.drafted, proposals, repeat(self._exactly)))

    def _tests(self, sequence: Sequence) -> bool:
        """At temperature 0 there is nothing to test: the best token stands."""
        return self._by_distribution and sequence.state.inverse_temperature > 0

    def step_took(self, plan: StepPlan, seconds: float) -> None:
        """A step from its plan to its end."""
        if all(chunk.draws == chunk.count for chunk in plan.chunks):
            self._took(CostTiming("step", plan.tokens, seconds))

    def heard(self, chunk: Chunk, token_ids: tuple[int, ...], counters: Counters) -> int:
        """What was drawn where ``chunk`` had guesses; how many of these stand."""
        drafted = chunk.drafted
        stood = 0
        while stood < min(len(drafted), len(token_ids)) and drafted[stood] == token_ids[stood]:
            stood += 1
        counters.draft_tokens += len(drafted)
        counters.draft_accepted_tokens += stood
        counters.draft_steps += 1
        # One that ended in the midst says nothing of the guesses after its end.
        tested = stood if stood == len(token_ids) else len(drafted)
        if tested and self.forced_length is None:  # what is said to measure costs is no text
            self._rule.heard(chunk.sequence.arrival, tested, stood)
        return stood

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._drafter.forget(sequence.arrival)
        self._proposals.pop(sequence.arrival, None)
        self._rule.forget(sequence.arrival)
