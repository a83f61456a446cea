"""Grammars in the engine's steps: whose masks are made when, and which tokens take no step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequenced
from typing import NamedTuple

from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.step_plan import StepPlan
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.grammar.step_masks import MaskPlace, PendingMasks, StepMasks, wait_for
from lexshard.actors.messages import (
    MASK_TIER,
    Certificate,
    FinishReason,
    SamplingParameters,
    TokenOrigin,
)
from lexshard.actors.states.mask import Mask

# What a token that alone was allowed has for a certificate and an origin.
FORCED = Certificate("forced", "deterministic", MASK_TIER, 0, 0, 0.0, False, 0.0)
BY_GRAMMAR = TokenOrigin("grammar")
# Inside a long text what must follow takes 60 us a token to find. Of such tokens the sequences of a
# step are given so many; the rest follows in later steps.
LONG_TOKENS = 16
LATE_SECONDS = 0.001  # that an engine waits for late masks which has nothing else to do


def check_constraints(parameters: SamplingParameters) -> None:
    """Raises ValueError for what contradicts a grammar, which says itself where an output ends, and
    for labels that are not said."""
    if parameters.labels and not parameters.allowed_ids:
        raise ValueError("labels are some of the allowed ids: name them")
    if parameters.labels and parameters.max_tokens > 1:
        raise ValueError("labels are of one token: max_tokens must be 1")
    if parameters.grammar is not None:
        for name in ("ignore_eos", "min_tokens", "allowed_ids"):
            if getattr(parameters, name) not in (False, 0, None):
                raise ValueError(f"a grammar says itself what may follow: {name} cannot, too")


class ForcedRun(NamedTuple):
    """Tokens that a sequence was given without a step, and why it ends with the last of them."""

    token_ids: tuple[int, ...] = ()
    reason: FinishReason | None = None
    stop: int | None = None


def _tells(sequence: Sequence) -> bool:
    """Whether a client is told what its rows read."""
    asked = sequence.request.parameters
    return asked.certificate or asked.receipt or asked.draft or asked.logprobs is not None


class Constraints:
    """The grammars of the sequences that have one. One thread at a time."""

    def __init__(self, vocabulary_size: int, eos_ids: tuple[int, ...]) -> None:
        self._vocabulary_size = vocabulary_size
        self._eos_ids = eos_ids
        self._step_masks: StepMasks | None = None  # from the first grammar on
        self._late: list[Sequence] = []
        self._long_left = LONG_TOKENS

    def prepare(self, drawing: Iterable[Sequence]) -> None:
        """Before a step is planned: guesses that a grammar refuses are none, and sequences whose
        masks are still being made are no part of it. Where they came late, the guesses that they
        are for come back, so that what was waited for is of use.

        Guesses that are tested by distributions stay, whatever they are: one that is refused falls
        in its test, and what replaces it makes up for what its drafter gave tokens that cannot be.
        """
        self._long_left = LONG_TOKENS
        late, self._late = self._late, []
        for sequence in late:
            pending = sequence.pending_masks
            sequence.masking = pending is not None and not pending.done
            if sequence.masking:
                self._late.append(sequence)
            elif pending is not None and sequence.blocks:
                sequence.drafted[:] = pending.guesses
                sequence.proposals = pending.proposals
        for sequence in drawing:
            if sequence.matcher is None or not sequence.drafted or sequence.masking:
                continue
            pending = sequence.pending_masks
            if pending is not None and pending.done and not pending.guesses:
                sequence.pending_masks = pending = None  # it was begun before there were any
            if pending is not None:
                sequence.keep_guesses(pending.serve(sequence.drafted))
            elif not sequence.tests_guesses:
                sequence.keep_guesses(sequence.matcher.accepted(sequence.drafted))

    def start(self, plan: StepPlan) -> None:
        """Begins with the masks of a step's rows."""
        asked = [
            (chunk.sequence, chunk.drafted)
            for chunk in plan.chunks
            if chunk.draws and chunk.sequence.matcher is not None
        ]
        self._begin(asked, alone=len(plan.chunks) == 1)

    def begin(self, sequences: Iterable[Sequence], *, alone: bool) -> None:
        """Begins with the masks of ``sequences`` that have a grammar and draw a token each, in a
        step which they are ``alone`` in or not."""
        self._begin([(each, ()) for each in sequences], alone=alone)

    def _begin(self, asked: Iterable[tuple[Sequence, tuple[int, ...]]], *, alone: bool) -> None:
        """Begins with the masks of sequences and their guesses, where they are not on their way."""
        wanted = []
        for sequence, guesses in asked:
            if sequence.pending_masks is None:
                assert sequence.matcher is not None
                proposals = sequence.proposals[: len(guesses)]
                sequence.pending_masks = PendingMasks(sequence.matcher, guesses, proposals)
                wanted.append(sequence.pending_masks)
        self._make(wanted, alone=alone)

    def go_on_in_call(self, sequence: Sequence, run: list[int], room: int) -> bool:
        """A sequence was given its last token in a call, and is given those that must follow it, at
        most ``room``, which are noted in ``run``; whether it draws the next one. What ends it, or
        takes long to find, is left to `go_on`. Raises `GrammarError`."""
        matcher = sequence.matcher
        assert matcher is not None
        token_id = sequence.token_ids[-1]
        matcher.consume((token_id,))
        while (following := matcher.forced()) is not None:
            length = sequence.output_length + 1
            ends, _ = sequence.request.parameters.end_with(following, length, self._eos_ids)
            if ends or matcher.long or len(run) == room or not sequence.state.may_follow(following):
                return False
            sequence.state.append(following)
            run.append(following)
            matcher.consume((following,))
        return True

    def begin_in_call(self, sequences: Sequenced[Sequence], places: Sequenced[MaskPlace]) -> None:
        """Begins with the masks of ``sequences``, of which no token must follow their own, each in
        its place."""
        wanted = []
        for sequence, place in zip(sequences, places, strict=True):
            assert sequence.matcher is not None
            sequence.pending_masks = PendingMasks(sequence.matcher, place=place)
            wanted.append(sequence.pending_masks)
        self._make(wanted, alone=False)

    def _make(self, wanted: list[PendingMasks], *, alone: bool) -> None:
        if wanted:
            if self._step_masks is None:
                self._step_masks = StepMasks(self._vocabulary_size)
            self._step_masks.start(wanted, alone=alone)

    def begun(self, sequences: Iterable[Sequence]) -> tuple[Mask | None, ...] | None:
        """The masks of ``sequences`` that draw a token each, in their order; empty where none has
        one. None where one is late, or its grammar fails: then all stay on their way."""
        masked = [each for each in sequences if each.pending_masks is not None]
        if not masked:
            return ()
        pending = self.come(masked)
        if pending is None:
            return None
        found = {own: each.result()[0] for own, each in zip(masked, pending, strict=True)}
        return tuple(map(found.get, sequences))

    def come(self, sequences: Sequenced[Sequence]) -> list[PendingMasks] | None:
        """What is made for ``sequences``, taken from them; None where one is late, or its grammar
        fails: then all stay on their way."""
        pending = [each.pending_masks for each in sequences if each.pending_masks is not None]
        if not wait_for(pending) or any(each.failed for each in pending):
            return None
        for each in sequences:
            each.pending_masks = None
        return pending

    def in_one_call(self, sequences: Iterable[Sequence]) -> bool:
        """Whether one call may take several steps of ``sequences`` with their masks: clients are
        told nothing of those."""
        return not any(map(_tells, sequences))

    def draws_behind(self, sequence: Sequence, token_id: int) -> bool:
        """Whether a sequence draws the token behind ``token_id``, which it was given: no grammar
        says what must follow. Raises `GrammarError`."""
        matcher = sequence.matcher
        assert matcher is not None
        matcher.consume((token_id,))
        if sequence.request.parameters.logprobs is not None:
            return True
        return matcher.forced() is None

    def take(self, plan: StepPlan, broken: dict[Sequence, Exception]) -> set[Sequence]:
        """Waits for the masks of a step, not for long; the sequences that lack theirs, whose rows
        cannot be decided now. Those whose grammar has failed are ``broken``."""
        wanted = [
            (chunk, chunk.sequence.pending_masks)
            for chunk in plan.chunks
            if chunk.draws and chunk.sequence.pending_masks is not None
        ]
        if not wanted:
            return set()
        wait_for([pending for _, pending in wanted])
        late = set()
        for chunk, pending in wanted:
            sequence = chunk.sequence
            if not pending.done:
                self._late.append(sequence)
                sequence.masking = True
                late.add(sequence)
                continue
            sequence.pending_masks = None
            try:
                sequence.masks = pending.result()[: chunk.draws]
            except GrammarError as error:
                broken[sequence] = error
        return late

    def wait(self) -> bool:
        """Waits a moment for late masks of sequences whose clients are still there; whether there
        are any."""
        self._late = [sequence for sequence in self._late if not sequence.cancelled]
        for sequence in self._late[:1]:
            if sequence.pending_masks is not None:
                sequence.pending_masks.wait(LATE_SECONDS)
        return bool(self._late)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: nothing waits for its masks."""
        if sequence.masking:
            self._late = [each for each in self._late if each is not sequence]

    def go_on(self, sequence: Sequence, token_ids: tuple[int, ...]) -> ForcedRun:
        """A sequence was given ``token_ids``; it is given those that must follow, too, unless their
        log-probabilities are asked for, or they are many: then it draws the next one, which alone
        its mask holds. Raises `GrammarError`."""
        matcher, parameters = sequence.matcher, sequence.request.parameters
        assert matcher is not None
        matcher.consume(token_ids)
        if parameters.logprobs is not None:
            return ForcedRun()
        run = []
        while (token_id := matcher.forced()) is not None:
            self._long_left -= matcher.long
            if matcher.long and self._long_left < 0:
                break
            if not sequence.state.may_follow(token_id):
                break
            sequence.state.append(token_id)
            run.append(token_id)
            length = sequence.output_length
            reason, stop = parameters.end_with(token_id, length, self._eos_ids)
            if reason is not None:
                return ForcedRun(tuple(run), reason, stop)
            matcher.consume((token_id,))
        return ForcedRun(tuple(run))

    def close(self) -> None:
        """Ends what makes masks."""
        if self._step_masks is not None:
            self._step_masks.close()
