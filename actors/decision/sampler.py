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
from dataclasses import replace
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
    some_rows,
)
from lexshard.actors.messages import RowDecision, TokenLogprobs
from lexshard.actors.states.deltas import NO_DELTAS, Deltas
from lexshard.actors.states.row_table import RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.actors.verification import emitted_tokens
from lexshard.kernels import pool
from lexshard.kernels.ahead import WHOLE_ROWS, is_postponed
from lexshard.kernels.decision import (
    block_maxima,
    decide_candidates,
    decide_dense,
    decide_packed,
)
from lexshard.kernels.draw import Controls
from lexshard.kernels.logprobs import score_rows
from lexshard.kernels.penalties import select_rows


class AllTokensExcludedError(ValueError):
    """A sequence has no token left to draw."""

    def __init__(self) -> None:
        super().__init__(
            "every token is excluded by allowed token ids, bad words, logit bias or min_tokens: "
            "relax one of them"
        )


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

    def apply(self, deltas: Deltas) -> None:
        """What happened to this sampler's sequences happens here."""
        self._states.apply(deltas)

    def decide(self, work: DecisionWork) -> DecisionResult:
        """A decision per row: candidate rows first, then dense ones. Applies the deltas before."""
        started = time.perf_counter()
        if work.deltas is not NO_DELTAS:
            self.apply(work.deltas)
        decisions: list[RowDecision | None] = []
        if work.candidates is not None:
            decisions.extend(self._decide_candidates(work.candidates))
        if work.dense is not None:
            decisions.extend(self._decide_whole_rows(work.dense))
        return DecisionResult(work.step, tuple(decisions), time.perf_counter() - started)

    def _decide_candidates(self, candidates: CandidateRows) -> list[RowDecision | None]:
        rows = self._states.table(candidates.rows)
        controls = rows.controls
        if True in candidates.truncated.tolist():
            controls = controls._replace(top_p=np.where(candidates.truncated, 1.0, controls.top_p))
        if self._threads == 1 or len(rows) == 1:
            if rows.packed is not None and controls is rows.controls:
                tokens = decide_packed(
                    candidates.ids, candidates.raw, candidates.offsets, rows.packed
                )
            else:
                tokens = decide_candidates(
                    candidates.ids, candidates.raw, candidates.offsets, controls, rows.flat
                )
        else:
            tokens = np.empty(len(rows), np.int64)

            def decide(first: int, last: int) -> None:
                tokens[first:last] = decide_candidates(
                    candidates.ids,
                    candidates.raw,
                    candidates.offsets[first : last + 1],
                    _some_controls(controls, first, last),
                    select_rows(rows.flat, first, last),
                )

            sizes = np.diff(candidates.offsets) + 1
            _run(decide, pool.even_shares(sizes.tolist(), self._threads))
        decisions = [RowDecision(token) if token >= 0 else None for token in tokens.tolist()]
        if "labels" in rows.kinds:
            for row, count in enumerate(rows.logprobs):
                if count is not None and tokens[row] >= 0:
                    token_id = int(tokens[row])
                    scores = _label_logprobs(candidates, row, token_id, count)
                    decisions[row] = RowDecision(token_id, scores)
        return decisions

    def _decide_whole_rows(self, dense: DenseRows) -> list[RowDecision | None]:
        """Of the rows those that draw and those that test a guess, each in their way."""
        testing = sorted(dense.rows.tests)
        if not testing:
            return self._decide_dense(dense)
        decisions: list[RowDecision | None] = [None] * len(dense.rows.sequences)
        drawing = [row for row in range(len(decisions)) if row not in testing]
        for rows, decide in ((drawing, self._decide_dense), (testing, self._test_guesses)):
            if rows:
                own = some_rows(dense, rows)
                for row, decision in zip(rows, decide(own), strict=True):
                    decisions[row] = decision
        return decisions

    def _test_guesses(self, dense: DenseRows) -> list[RowDecision | None]:
        rows = self._states.table(dense.rows)
        logits = dense.logits[:, : self._states.vocabulary_size]
        tokens = emitted_tokens(
            logits,
            [dense.rows.tests[row] for row in range(len(rows))],
            rows.controls,
            rows.min_p.tolist(),
            rows.flat,
            self._sigmoid,
        )
        return _with_logprobs(logits, tokens, rows.logprobs)

    def _decide_dense(self, dense: DenseRows) -> list[RowDecision | None]:
        rows = self._states.table(dense.rows)
        logits = dense.logits[:, : self._states.vocabulary_size]
        count = len(rows)
        tokens = np.empty(count, np.int64)

        def decide(first: int, last: int) -> None:
            own = logits[first:last]
            if is_postponed(WHOLE_ROWS):  # every token is a candidate
                tokens[first:last] = _decide_all(own, rows, first)
                return
            maxima = block_maxima(own) if dense.maxima is None else dense.maxima[first:last]
            whole = last - first == count
            decided = decide_dense(
                own,
                maxima,
                rows.controls if whole else _some_controls(rows.controls, first, last),
                rows.flat if whole else select_rows(rows.flat, first, last),
                self._hot_ids,
            )
            tokens[first:last] = decided.tokens

        _run(decide, pool.even_shares([1] * count, min(self._threads, count)))
        return _with_logprobs(logits, tokens, rows.logprobs)


def _decide_all(
    logits: npt.NDArray[np.float32], rows: RowTable, first: int
) -> npt.NDArray[np.int64]:
    """The tokens of ``rows`` from ``first`` on, whose ``logits`` [N, V] are all candidates."""
    count, size = logits.shape
    ids = np.tile(np.arange(size, dtype=np.int32), count)
    offsets = np.arange(count + 1, dtype=np.int64) * size
    last = first + count
    controls, flat = _some_controls(rows.controls, first, last), select_rows(rows.flat, first, last)
    return decide_candidates(ids, logits.reshape(-1), offsets, controls, flat)


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
    counts: Sequence[int | None],
) -> list[RowDecision | None]:
    """The decisions for rows of ``logits`` [B, V], with as many log-probabilities as ``counts``
    [B] say; None where no token is left."""
    wanted = {
        row: count for row, count in enumerate(counts) if count is not None and tokens[row] >= 0
    }
    scores: dict[int, TokenLogprobs] = {}
    if wanted:
        rows = list(wanted)
        raw = logits if len(rows) == len(logits) else logits[rows]
        found = token_logprobs(raw, tokens[rows], list(wanted.values()))
        told = (_with_logits(own, each) for own, each in zip(raw, found, strict=True))
        scores = dict(zip(rows, told, strict=True))
    return [
        RowDecision(token, scores.get(row)) if token >= 0 else None
        for row, token in enumerate(tokens.tolist())
    ]


def _label_logprobs(
    candidates: CandidateRows, row: int, token_id: int, count: int
) -> TokenLogprobs:
    """Log-probabilities of a row that has labels for candidates, among these."""
    own = slice(candidates.offsets[row], candidates.offsets[row + 1])
    ids, raw = candidates.ids[own], candidates.raw[own]
    place = np.searchsorted(ids, [token_id])
    [found] = token_logprobs(np.ascontiguousarray(raw[None]), place, [min(count, len(ids))])
    top = tuple((int(ids[each]), logprob) for each, logprob in found.top)
    return TokenLogprobs(token_id, found.logprob, found.rank, top)


def _with_logits(raw: npt.NDArray[np.float32], found: TokenLogprobs) -> TokenLogprobs:
    """``found`` with the logits it was computed from, those of one row [V]."""
    best = raw[[token_id for token_id, _ in found.top]].tolist() if found.top else []
    return replace(found, logit=float(raw[found.token_id]), top_logits=tuple(best))


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
