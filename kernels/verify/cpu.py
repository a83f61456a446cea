"""Verification in numba: rows in order up to the first rejection, sequences shared among threads.

Most drafts are decided by fast normalisers with a bound on their error; a row is added up in
float64 only where the bound leaves it open, or where its residual is drawn. So the tokens are the
reference's.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels import pool
from kernels.blocks import BLOCK
from kernels.noise.cpu import TWELVE, TWENTY, ZERO, philox
from kernels.noise.reference import HALF
from kernels.penalties.cpu import MINUS_INFINITY
from kernels.verify.normalizer import (
    CHUNK,
    LOG_MARGIN,
    block_maxima,
    exact_log_total,
    is_bounded,
    largest,
    survey,
)
from kernels.verify.race import (
    CERTAIN,
    DENSE,
    NOWHERE,
    SPARSE,
    ProposedRow,
    ScaledRow,
    log_probability,
    race,
    sparse_probability,
)
from kernels.verify.reference import ACCEPTANCE_LANE
from kernels.verify.types import DenseProposals, DraftedRows, Proposals, SparseProposals, Verdict

LANE = np.uint64(ACCEPTANCE_LANE)
EXACT, COUPLED, GREEDY = 0, 1, 2
MODES = {"exact": EXACT, "coupled": COUPLED, "greedy": GREEDY}
NO_LOGITS = np.empty((0, 0), np.float32)
NO_IDS, NO_PROBABILITIES = np.empty(0, np.int32), np.empty(0, np.float64)
NO_OFFSETS, NO_SCALES = np.zeros(1, np.int64), np.empty(0, np.float64)


@njit(nogil=True, cache=True)
def acceptance(key, position):  # type: ignore[no-untyped-def]
    """As the reference has it; arguments are uint64."""
    x0, x1, x2, x3 = philox(position, ZERO, LANE, key)
    mantissa = (x0 << TWENTY) | (x1 >> TWELVE)
    return (2.0 * np.float64(mantissa) + 1.0) * 2.0**-53, x2 | (x3 << HALF)


@njit(nogil=True, cache=True)
def greedy_token(row):  # type: ignore[no-untyped-def]
    """The token of the largest logit, the lowest of equals; -1 where all are excluded."""
    highest, where = MINUS_INFINITY, -1
    for first in range(0, row.size, CHUNK):
        maximum = largest(row[first : first + CHUNK])
        if maximum > highest:
            highest, where = maximum, first
    if where >= 0:
        while row[where] != highest:
            where += 1
    return where


@njit(nogil=True, cache=True)
def _draw(row, scale, proposed, maxima, key, position):  # type: ignore[no-untyped-def]
    """As `kernels.draw` does, over every token; the proposal does not matter."""
    if scale == 0.0:
        return greedy_token(row)
    block_maxima(row, maxima)
    target = ScaledRow(row, scale, 0.0, 0.0)
    return race(target, proposed, np.bool_(False), maxima, key, position)


@njit(nogil=True, cache=True)
def _log_ratio(target, proposed):  # type: ignore[no-untyped-def]
    """``log p(x) - log q(x)`` of the draft."""
    token = proposed.token
    log_q = 0.0
    if proposed.kind == DENSE:
        log_q = log_probability(proposed.dense, token)
    elif proposed.kind == SPARSE:
        q = sparse_probability(proposed.ids, proposed.probabilities, token)
        log_q = math.log(q) if q > 0.0 else -np.inf
    return log_probability(target, token) - log_q


@njit(nogil=True, cache=True)
def _fast_total(row, scale, maxima, weights):  # type: ignore[no-untyped-def]
    """The row with a fast normaliser, and whether that is within LOG_MARGIN."""
    top, total = survey(row, scale, maxima, weights)
    log_total = math.log(total) if total > 0.0 else 0.0
    return ScaledRow(row, scale, np.float64(top) * scale, log_total), is_bounded(top, scale)


@njit(nogil=True, cache=True)
def _exact_total(row, weights):  # type: ignore[no-untyped-def]
    log_total = exact_log_total(row.logits, row.scale, row.top, weights)
    return ScaledRow(row.logits, row.scale, row.top, log_total)


@njit(nogil=True, cache=True)
def _test(row, scale, proposed, key, position, maxima, scratch):  # type: ignore[no-untyped-def]
    """Whether a draft stands, and the token that its row emits."""
    proposed_maxima, weights, exact_weights = scratch
    uniform, residual_key = acceptance(key, position)
    log_uniform = math.log(uniform)
    target, bounded = _fast_total(row, scale, maxima, weights)
    margin = LOG_MARGIN
    if proposed.kind == DENSE:
        dense, also_bounded = _fast_total(
            proposed.dense.logits, proposed.dense.scale, proposed_maxima, weights
        )
        proposed = ProposedRow(
            proposed.kind, proposed.token, dense, proposed.ids, proposed.probabilities
        )
        bounded = bounded and also_bounded
        margin *= 2.0
    if bounded and log_uniform < _log_ratio(target, proposed) - margin:
        return True, proposed.token
    target = _exact_total(target, exact_weights)
    if proposed.kind == DENSE:
        proposed = ProposedRow(
            proposed.kind,
            proposed.token,
            _exact_total(proposed.dense, exact_weights),
            proposed.ids,
            proposed.probabilities,
        )
    if log_uniform < _log_ratio(target, proposed):
        return True, proposed.token
    token = -1
    for kind in (proposed.kind, NOWHERE):
        # Rounding can leave nothing of a residual; then the target alone is drawn from.
        if token < 0:
            proposed = ProposedRow(
                kind, proposed.token, proposed.dense, proposed.ids, proposed.probabilities
            )
            token = race(target, proposed, np.bool_(True), maxima, residual_key, position)
    return False, token


@njit(nogil=True, cache=True)
def _verify(  # type: ignore[no-untyped-def]
    logits,
    rows,
    mode,
    kind,
    dense_logits,
    dense_scales,
    ids,
    probabilities,
    offsets,
    first,
    last,
    accepted,
    tokens,
):
    """Decides the sequences ``first:last``."""
    blocks = -(-logits.shape[1] // BLOCK)
    maxima = np.empty(blocks, np.float32)
    scratch = (
        np.empty(blocks, np.float32),
        np.empty(CHUNK, np.float32),
        np.empty(CHUNK, np.float64),
    )
    for sequence in range(first, last):
        start, stop = rows.offsets[sequence], rows.offsets[sequence + 1]
        scale = 0.0 if mode == GREEDY else rows.inverse_temperature[sequence]
        key, position = rows.key[sequence], rows.position[sequence]
        count = 0
        for row in range(start, stop):
            place = position + np.uint64(row - start)
            draft = row - sequence
            token = -1 if row == stop - 1 else rows.drafts[draft]
            own = ScaledRow(logits[row], scale, 0.0, 0.0)
            proposed = ProposedRow(CERTAIN, token, own, ids, probabilities)
            stands = False
            if mode == EXACT and scale > 0.0 and row < stop - 1:
                if kind == DENSE:
                    own = ScaledRow(dense_logits[draft], dense_scales[sequence], 0.0, 0.0)
                    proposed = ProposedRow(DENSE, token, own, ids, probabilities)
                elif kind == SPARSE:
                    part = slice(offsets[draft], offsets[draft + 1])
                    proposed = ProposedRow(SPARSE, token, own, ids[part], probabilities[part])
                stands, tokens[row] = _test(
                    logits[row], scale, proposed, key, place, maxima, scratch
                )
            else:
                tokens[row] = _draw(logits[row], scale, proposed, maxima, key, place)
                stands = row < stop - 1 and tokens[row] == token
            if not stands:
                break
            count += 1
        accepted[sequence] = count


def verify(
    logits: npt.NDArray[np.float32], rows: DraftedRows, mode: str, proposals: Proposals
) -> Verdict:
    kind = CERTAIN
    dense_logits, dense_scales = NO_LOGITS, NO_SCALES
    ids, probabilities, offsets = NO_IDS, NO_PROBABILITIES, NO_OFFSETS
    if isinstance(proposals, DenseProposals):
        kind = DENSE
        dense_logits, dense_scales = proposals.logits, proposals.inverse_temperature
    elif isinstance(proposals, SparseProposals):
        kind = SPARSE
        ids, probabilities, offsets = proposals.ids, proposals.probabilities, proposals.offsets
    sequences = len(rows.offsets) - 1
    tokens = np.full(len(logits), -1, np.int64)
    accepted = np.zeros(sequences, np.int64)
    shares = pool.even_shares(np.diff(rows.offsets).tolist(), pool.threads())
    pool.run(
        [
            partial(
                _verify,
                logits,
                rows,
                MODES[mode],
                kind,
                dense_logits,
                dense_scales,
                ids,
                probabilities,
                offsets,
                first,
                last,
                accepted,
                tokens,
            )
            for first, last in shares
        ]
    )
    return Verdict(accepted, tokens)
