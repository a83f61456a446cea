"""What a step led to: tokens of sequences, their ends, and what clients are told of both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.own import OwnDecisions, OwnStep
from lexshard.actors.decision.plane import DecisionPlane, PendingStep
from lexshard.actors.decision.sampler import AllTokensExcludedError
from lexshard.actors.engine.constraints import BY_GRAMMAR, FORCED, Constraints, ForcedRun
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.several_steps.runs import RunSteps
from lexshard.actors.engine.speculation import Speculation
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.messages import (
    Certificate,
    FinishReason,
    RowDecision,
    SequenceEvent,
    SequenceTiming,
    TokenLogprobs,
    TokenOrigin,
)
from lexshard.actors.states.sequence_state import SequenceStates


@dataclass(frozen=True, slots=True, eq=False)
class PendingRows:
    """Rows of a step whose decisions are on their way, with what they are made from.

    They stand in the order of the plan's chunks, those of one chunk in order of position.
    """

    decisions: PendingStep | OwnStep | RunSteps  # [N]
    candidates: Candidates | RunSteps  # of N rows


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """A step whose decisions have been asked for: `Steps.commit` ends it."""

    plan: StepPlan
    pending: PendingRows | None
    broken: dict[Sequence, Exception]
    late: set[Sequence]  # their masks were not there: what they draw comes in another step


class Booking:
    """Gives sequences their tokens, and ends them, for everyone who keeps something of theirs."""

    def __init__(
        self,
        eos_ids: tuple[int, ...],
        head: SequenceHead,
        plane: DecisionPlane | OwnDecisions,
        states: SequenceStates,
        scheduler: Scheduler,
        constraints: Constraints,
        speculation: Speculation | None,
    ) -> None:
        self.counters = Counters()
        self._eos_ids = eos_ids
        self._head = head
        self._plane = plane
        self._states = states
        self._scheduler = scheduler
        self._constraints = constraints
        self._speculation = speculation

    def book(
        self,
        step: InFlightStep,
        chunk: Chunk,
        decisions: list[RowDecision | None],
        first: int,
    ) -> SequenceEvent | None:
        """Book what one chunk led to, whose rows begin with ``first``; what its client is told, if
        anything.

        A row's token is the sequence's own where all guesses before it were drawn, too.
        """
        sequence = chunk.sequence
        told = sequence.output_length - chunk.said
        broken = step.broken.get(sequence)
        if broken is None and chunk.draws and decisions[first] is None:
            broken = AllTokensExcludedError()
        if broken is not None and not chunk.said:
            return self._event(sequence, told, (), reason="error", error=broken)
        if not chunk.draws:
            caught_up = chunk.start + chunk.count == len(sequence.token_ids)
            return self._event(sequence, told, (), reason="length") if caught_up else None
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        reason: FinishReason | None = None
        stop: int | None = None
        for place in range(chunk.draws):
            decision = decisions[first + place]
            if decision is None:  # the next step says so, when it is this token's turn
                break
            token_id = decision.token_id
            if not chunk.said:
                sequence.state.append(token_id)
            token_ids += (token_id,)
            if decision.logprobs is not None:
                logprobs += (decision.logprobs,)
            parameters, length = sequence.request.parameters, told + len(token_ids)
            reason, stop = parameters.end_with(token_id, length, self._eos_ids)
            if reason is not None or not chunk.goes_on(place, token_id):
                break
            if chunk.forced:
                token_ids += chunk.forced[place]
                self.counters.forced_tokens += len(chunk.forced[place])
        if chunk.drafted:
            stood = chunk.stood(token_ids)
            self.counters.count_guesses(len(chunk.drafted), stood)
            if self._speculation is not None and sequence.drafter == "engine":
                self._speculation.heard(chunk, len(token_ids), stood)
            kept = sequence.prompt_length + told + stood
            if reason is None:  # its last token is computed (again): the next one is drawn there
                kept = min(kept, len(sequence.token_ids) - 1)
            sequence.roll_back(kept, self._scheduler.pool)
        origins: tuple[TokenOrigin, ...] = ()
        if sequence.request.parameters.draft:
            origins = chunk.origins(token_ids, self._drafter_name(sequence))
        certificates: tuple[Certificate, ...] = ()
        if sequence.request.parameters.certificate and step.pending is not None:
            certificates = step.pending.candidates.certificates[first : first + len(token_ids)]
        logits: tuple[float, ...] = ()
        if sequence.request.parameters.receipt and step.pending is not None:
            logits = _logits(sequence, step.pending.candidates, first, token_ids)
        forced = ForcedRun()
        # Where a mask is on its way, a run has told the grammar of its tokens: none must follow.
        masking = sequence.pending_masks is not None
        goes_on = reason is None and broken is None and bool(token_ids) and not masking
        if sequence.matcher is not None and goes_on:
            try:
                forced = self._constraints.go_on(sequence, () if chunk.said else token_ids)
                reason, stop = forced.reason, forced.stop
            except GrammarError as error:
                broken = error
        if broken is not None and reason is None:  # what was drawn before is told
            reason = "error"
        self._note(sequence, token_ids + forced.token_ids)
        last = len(chunk.forced[-1]) if chunk.forced else 0
        draws, ends = max(1, chunk.draws - len(chunk.drafted)), reason is not None
        sequence.went_on(draws=draws, forced=last + len(forced.token_ids), ends=ends)
        return self._event(
            sequence,
            told,
            token_ids,
            forced=forced.token_ids,
            logprobs=logprobs,
            certificates=certificates,
            origins=origins,
            logits=logits,
            error=broken if reason == "error" else None,
            reason=reason,
            stop=stop,
        )

    def begin(self, sequence: Sequence) -> SequenceEvent | None:
        """A sequence that the scheduler has been given; what its client is told where a grammar
        says all of its output."""
        if sequence.matcher is None or sequence.scores is not None:
            return None
        told = sequence.output_length
        try:
            forced = self._constraints.go_on(sequence, ())
        except GrammarError as error:
            return self._event(sequence, told, (), reason="error", error=error)
        self._note(sequence, forced.token_ids)
        if forced.reason is None:
            sequence.untold = forced.token_ids
            return None
        return self._event(
            sequence, told, (), forced=forced.token_ids, reason=forced.reason, stop=forced.stop
        )

    def _note(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """A sequence has been given tokens: all that follow it are told."""
        self._plane.append(sequence.arrival, *token_ids)
        self._head.append(sequence.arrival, *token_ids)
        self.counters.generated_tokens += len(token_ids)

    def _drafter_name(self, sequence: Sequence) -> str:
        if sequence.drafter == "client" or self._speculation is None:
            return sequence.drafter
        return self._speculation.drafter_name

    def _event(
        self,
        sequence: Sequence,
        told: int,
        token_ids: tuple[int, ...],
        *,
        forced: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        certificates: tuple[Certificate, ...] = (),
        origins: tuple[TokenOrigin, ...] = (),
        logits: tuple[float, ...] = (),
        reason: FinishReason | None = None,
        stop: int | None = None,
        error: Exception | None = None,
    ) -> SequenceEvent:
        """What a client is told of ``token_ids``, and of those that a grammar has ``forced`` behind
        them, or before where they are untold. The sequence had ``told`` output tokens before; with
        a ``reason`` it ends."""
        request, parameters = sequence.request, sequence.request.parameters
        untold, sequence.untold = sequence.untold, ()
        first = told - len(untold) <= len(request.resumed_ids)
        self.counters.forced_tokens += len(untold) + len(forced)
        if untold or forced:
            before, behind = len(untold), len(forced)
            token_ids = (*untold, *token_ids, *forced)
            if parameters.certificate:
                certificates = (*[FORCED] * before, *certificates, *[FORCED] * behind)
            if parameters.draft:
                origins = (*[BY_GRAMMAR] * before, *origins, *[BY_GRAMMAR] * behind)
            if parameters.receipt:
                logits = (*[math.nan] * before, *logits, *[math.nan] * behind)
        event = SequenceEvent(
            request.request_id,
            request.choice,
            token_ids,
            logprobs,
            prompt_logprobs=_scores(sequence) if first else None,
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=sequence.cached_tokens,
            error=None if error is None else str(error),
            refused=isinstance(error, AllTokensExcludedError | GrammarError),
            certificates=certificates,
            origins=origins,
            timing=self._timing(sequence) if first or reason is not None else None,
            answers=sequence.answers,
            logits=logits,
        )
        sequence.answers = None
        if reason is not None:
            self.counters.cached_prompt_tokens += sequence.cached_tokens
            self.counters.finished_prompt_tokens += sequence.prompt_length
            self.counters.finished += 1
            self._scheduler.remove(sequence)
            self.close(sequence)
        return event

    def _timing(self, sequence: Sequence) -> SequenceTiming:
        """Where the time of a sequence went until now, of which an event is about to tell."""
        spent = self.counters.verify_seconds, self._head.counters.exchange_seconds
        if sequence.first_token_at is None:
            sequence.first_token_at, sequence.spent_before = time.perf_counter(), spent
        verify, exchange = sequence.spent_before
        started = sequence.started_at or sequence.arrived_at
        return SequenceTiming(
            queued=started - sequence.arrived_at,
            prefill=sequence.first_token_at - started,
            verify=spent[0] - verify,
            exchange=spent[1] - exchange,
        )

    def cancel(self, request_id: str) -> None:
        """End every sequence of a request now; its blocks are free for the next step."""
        for sequence in self._scheduler.sequences_of(request_id):
            self._scheduler.remove(sequence)
            self.counters.cancelled += 1
            sequence.cancelled = True
            if not sequence.awaiting:
                self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Forget the sampling state of a sequence that has ended."""
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self._constraints.forget(sequence)
        self._plane.close(sequence.arrival)
        self._head.close(sequence.arrival)
        self._states.close(sequence.arrival)


def _logits(
    sequence: Sequence, candidates: Candidates | RunSteps, first: int, token_ids: tuple[int, ...]
) -> tuple[float, ...]:
    """Of the tokens that the rows from ``first`` on drew. Whether one that a grammar allows alone
    takes a row depends on guesses: its logit is told in no case."""
    logits = candidates.logits_of(first, token_ids)
    if sequence.matcher is None:
        return tuple(logits)
    masks = sequence.masks[: len(token_ids)]
    return tuple(
        math.nan if mask.count == 1 else logit for logit, mask in zip(logits, masks, strict=True)
    )


def _scores(sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    return None if sequence.scores is None else tuple(sequence.scores.entries)
