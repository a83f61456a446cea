"""The sampler: it owns the sampling state of its sequences and decides their next tokens.

The order of one decision: allowed ids, bad words and minimum length, logit bias; repetition,
frequency and presence penalties; temperature; min-p; top-k; top-p; draw. Log-probabilities are
those of the raw logits, before all of this.

A decision depends on the sequence's own history and logits, and on nothing else: not on the rows
beside it, not on how many samplers or threads there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.messages import (
    CandidateRows,
    DecisionResult,
    DecisionWork,
    DenseRows,
    SamplerSettings,
    some_columns,
)
from lexshard.actors.messages import RowDecision, TokenLogprobs
from lexshard.actors.states.deltas import NO_DELTAS, Deltas
from lexshard.actors.states.flat_needs import flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceState, SequenceStates
from lexshard.actors.verification import emitted_tokens
from lexshard.kernels import pool
from lexshard.kernels.decision import (
    PackedRows,
    block_maxima,
    decide_candidates,
    decide_dense,
    decide_packed,
    pack,
)
from lexshard.kernels.draw import Controls
from lexshard.kernels.logprobs import score_rows
from lexshard.kernels.penalties import Adjustments, select_rows

# Of so many sets of sequences decided together the controls are remembered.
KNOWN_ROWS = 32
# Columns copied to rows together for their log-probabilities: neighbours share cache lines.
SCORED_TOGETHER = 16


class AllTokensExcludedError(ValueError):
    """A sequence has no token left to draw."""

    def __init__(self) -> None:
        super().__init__(
            "every token is excluded by allowed token ids, bad words, logit bias or min_tokens: "
            "relax one of them"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Sequences that are decided together, as the kernels want them."""

    states: tuple[SequenceState, ...]
    controls: Controls
    adjustments: Adjustments
    packed: PackedRows | None  # the same for candidates, where no row has lists of ids
    tables: npt.NDArray[np.int32]
    steady: bool
    penalised: bool


class Sampler:
    """Decides the next tokens of its sequences.

    ``states`` are those of an engine in the same process, which keeps them itself; without them
    the sampler has its own and learns from deltas. ``hot_ids`` [H], sorted, are visited first.
    The same class runs in the engine's thread, in a thread or process of its own, and as a Ray
    actor.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        states: SequenceStates | None = None,
        hot_ids: npt.NDArray[np.int32] | None = None,
    ) -> None:
        if states is None:
            states = SequenceStates(settings.vocabulary_size, settings.eos_ids, settings.capacity)
        self._states = states
        self._threads = settings.threads
        self._sigmoid = settings.sigmoid
        self._hot_ids = hot_ids
        self._known_rows: dict[tuple[int, ...], _Rows] = {}

    def apply(self, deltas: Deltas) -> None:
        """What happened to this sampler's sequences happens here."""
        if deltas.closed:
            self._known_rows.clear()
        self._states.apply(deltas)

    def decide(self, work: DecisionWork) -> DecisionResult:
        """A decision per row: candidate rows first, then dense ones. Applies the deltas before."""
        started = time.perf_counter()
        if work.deltas is not NO_DELTAS:
            self.apply(work.deltas)
        decisions: list[RowDecision | None] = []
        if work.candidates is not None:
            rows = self._rows(work.candidates.sequences, work.candidates.drafted)
            decisions.extend(self._decide_candidates(work.candidates, rows))
        if work.dense is not None:
            decisions.extend(self._decide_whole_rows(work.dense))
        return DecisionResult(work.step, tuple(decisions), time.perf_counter() - started)

    def _rows(self, sequences: tuple[int, ...], drafted: tuple[tuple[int, ...], ...]) -> _Rows:
        """Controls and adjustments of the rows; those of an earlier step where they still hold,
        which is nearly always, but for penalties that count drafted tokens."""
        known = self._known_rows.get(sequences)
        if known is not None and known.steady and known.tables is self._states.tables:
            if not drafted:
                known.controls.position[:] = [len(state.history) for state in known.states]
            elif known.penalised:
                return self._make_rows(sequences, drafted)
            else:
                known.controls.position[:] = _positions(known.states, drafted)
            if known.packed is not None:
                known.packed.position[:] = known.controls.position
            return known
        rows = self._make_rows(sequences, drafted or ((),) * len(sequences))
        if not (drafted and rows.penalised):
            if len(self._known_rows) >= KNOWN_ROWS:
                self._known_rows.clear()
            self._known_rows[sequences] = rows
        return rows

    def _make_rows(self, sequences: tuple[int, ...], drafted: tuple[tuple[int, ...], ...]) -> _Rows:
        states = tuple(self._states[sequence] for sequence in sequences)
        adjustments = flatten_adjustments(self._states.adjustments(sequences, drafted))
        controls = Controls(
            inverse_temperature=np.array([s.inverse_temperature for s in states], np.float64),
            top_k=np.array([s.top_k for s in states], np.int64),
            top_p=np.array([s.parameters.top_p for s in states], np.float64),
            log_min_p=np.array([s.log_min_p for s in states], np.float64),
            key=np.array([s.key for s in states], np.uint64),
            position=np.array(_positions(states, drafted), np.uint64),
        )
        return _Rows(
            states,
            controls,
            adjustments,
            pack(controls, adjustments),
            self._states.tables,
            all(state.steady for state in states),
            any(state.penalised for state in states),
        )

    def _decide_candidates(
        self, candidates: CandidateRows, rows: _Rows
    ) -> list[RowDecision | None]:
        controls = rows.controls
        if True in candidates.truncated.tolist():
            controls = controls._replace(top_p=np.where(candidates.truncated, 1.0, controls.top_p))
        if self._threads == 1 or len(rows.states) == 1:
            if rows.packed is not None and controls is rows.controls:
                tokens = decide_packed(
                    candidates.ids, candidates.raw, candidates.offsets, rows.packed
                )
            else:
                tokens = decide_candidates(
                    candidates.ids, candidates.raw, candidates.offsets, controls, rows.adjustments
                )
        else:
            tokens = np.empty(len(rows.states), np.int64)

            def decide(first: int, last: int) -> None:
                tokens[first:last] = decide_candidates(
                    candidates.ids,
                    candidates.raw,
                    candidates.offsets[first : last + 1],
                    _some_controls(controls, first, last),
                    select_rows(rows.adjustments, first, last),
                )

            sizes = np.diff(candidates.offsets) + 1
            _run(decide, pool.even_shares(sizes.tolist(), self._threads))
        return [RowDecision(token) if token >= 0 else None for token in tokens.tolist()]

    def _decide_whole_rows(self, dense: DenseRows) -> list[RowDecision | None]:
        """Of the columns those that draw and those that test a guess, each in their way."""
        testing = [column for column, test in enumerate(dense.tests) if test is not None]
        if not testing:
            return self._decide_dense(dense, self._rows(dense.sequences, dense.drafted))
        decisions: list[RowDecision | None] = [None] * len(dense.sequences)
        drawing = [column for column in range(len(decisions)) if column not in testing]
        for columns, decide in ((drawing, self._decide_dense), (testing, self._test_guesses)):
            if columns:
                own = some_columns(dense, columns)
                decided = decide(own, self._rows(own.sequences, own.drafted))
                for column, decision in zip(columns, decided, strict=True):
                    decisions[column] = decision
        return decisions

    def _test_guesses(self, dense: DenseRows, rows: _Rows) -> list[RowDecision | None]:
        logits = dense.logits[: self._states.vocabulary_size]
        tokens = emitted_tokens(
            logits,
            [test for test in dense.tests if test is not None],
            rows.controls,
            [state.parameters.min_p for state in rows.states],
            rows.adjustments,
            self._sigmoid,
        )
        return _with_logprobs(logits, tokens, rows.states)

    def _decide_dense(self, dense: DenseRows, rows: _Rows) -> list[RowDecision | None]:
        size = self._states.vocabulary_size
        logits = dense.logits[:size]
        count = len(rows.states)
        tokens = np.empty(count, np.int64)

        def decide(first: int, last: int) -> None:
            own = logits[:, first:last]
            maxima = block_maxima(own) if dense.maxima is None else dense.maxima[:, first:last]
            whole = last - first == count
            decided = decide_dense(
                own,
                maxima,
                rows.controls if whole else _some_controls(rows.controls, first, last),
                rows.adjustments if whole else select_rows(rows.adjustments, first, last),
                self._hot_ids,
            )
            tokens[first:last] = decided.tokens

        _run(decide, pool.even_shares([1] * count, min(self._threads, count)))
        return _with_logprobs(logits, tokens, rows.states)


def _positions(states: Sequence[SequenceState], drafted: Sequence[tuple[int, ...]]) -> list[int]:
    """Of the tokens to be drawn, each after its sequence's own and those drafted."""
    return [
        len(state.history) + len(guesses) for state, guesses in zip(states, drafted, strict=True)
    ]


def _run(decide: Callable[[int, int], None], shares: Sequence[tuple[int, int]]) -> None:
    if len(shares) == 1:
        decide(*shares[0])
    else:
        pool.run([partial(decide, first, last) for first, last in shares])


def _some_controls(controls: Controls, first: int, last: int) -> Controls:
    parts: list[Any] = [each[first:last] for each in controls]
    return Controls(*parts)


def _with_logprobs(
    logits: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int64],
    states: Sequence[SequenceState],
) -> list[RowDecision | None]:
    """The decisions for columns of ``logits`` [V, B]; None where no token is left."""
    scores = _wanted_logprobs(logits, tokens, states)
    return [
        RowDecision(token, scores.get(column)) if token >= 0 else None
        for column, token in enumerate(tokens.tolist())
    ]


def _wanted_logprobs(
    logits: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int64],
    states: Sequence[SequenceState],
) -> dict[int, TokenLogprobs]:
    """Log-probabilities by column of ``logits`` [V, B], for the columns that have a token and whose
    sequence asked for them."""
    wanted = {
        column: state.parameters.logprobs
        for column, state in enumerate(states)
        if state.parameters.logprobs is not None and tokens[column] >= 0
    }
    scores: dict[int, TokenLogprobs] = {}
    columns = list(wanted)
    for first in range(0, len(columns), SCORED_TOGETHER):
        some = columns[first : first + SCORED_TOGETHER]
        counts = [wanted[column] for column in some]
        raw = np.ascontiguousarray(logits[:, some].T)
        scores.update(zip(some, token_logprobs(raw, tokens[some], counts), strict=True))
    return scores


def token_logprobs(
    raw: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of N positions from all their raw logits [N, V]: those of ``token_ids``
    [N], and of the ``counts`` [N] most likely ones by (logit descending, id ascending)."""
    scores = score_rows(raw, token_ids, max(counts, default=0))
    return [
        TokenLogprobs(
            token_id, logprob, rank, tuple(zip(ids[:count], logprobs[:count], strict=True))
        )
        for token_id, logprob, rank, ids, logprobs, count in zip(
            token_ids.tolist(), *(each.tolist() for each in scores), counts, strict=True
        )
    ]
