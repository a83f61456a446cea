"""Verification in numba: rows in order up to the first rejection, sequences shared among threads.

Most drafts are decided by fast normalisers with a bound on their error, and the proposal's row is
read only as far as it takes: ``log u < log p - log q`` is certain as soon as enough of the
proposal's denominator has been added up. A row is added up in float64 only where the bounds leave
open what stands, or what is drawn in its place. So the tokens are the reference's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels import pool
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.exponential.bounded_sum import factor_of, shift_of
from lexshard.kernels.noise.cpu import TWELVE, TWENTY, ZERO, philox
from lexshard.kernels.noise.reference import HALF
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.verify.normalizer import (
    CHUNK,
    LN_2,
    LOG_MARGIN,
    TOP_MARGIN,
    add_chunk,
    block_maxima,
    exact_log_total,
    fast_total,
    is_bounded,
    largest,
)
from lexshard.kernels.verify.race import (
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
from lexshard.kernels.verify.reference import ACCEPTANCE_LANE
from lexshard.kernels.verify.types import (
    DenseProposals,
    DraftedRows,
    Proposals,
    SparseProposals,
    Verdict,
)

LANE = np.uint64(ACCEPTANCE_LANE)
EXACT, COUPLED, GREEDY = 0, 1, 2
MODES = {"exact": EXACT, "coupled": COUPLED, "greedy": GREEDY}
NO_LOGITS = np.empty((0, 0), np.float32)
NO_IDS, NO_PROBABILITIES = np.empty(0, np.int32), np.empty(0, np.float64)
NO_OFFSETS, NO_SCALES = np.zeros(1, np.int64), np.empty(0, np.float64)
NO_MARGINS = (0.0, 0.0)


class VerifyScratch(NamedTuple):
    """What one thread works in, beside the logits."""

    maxima: npt.NDArray[np.float32]  # [ceil(V / 64)]
    bounds: npt.NDArray[np.float64]  # [ceil(V / 64)]
    weights: npt.NDArray[np.float64]  # [CHUNK]

    @classmethod
    def of(cls, size: int) -> VerifyScratch:
        blocks = blocks_of(size)
        return cls(np.empty(blocks, np.float32), np.empty(blocks), np.empty(CHUNK))


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
def _draw(row, scale, proposed, scratch, key, position):  # type: ignore[no-untyped-def]
    """As `kernels.draw` does, over every token; the proposal does not matter."""
    if scale == 0.0:
        return greedy_token(row)
    block_maxima(row, scratch.maxima)
    target = ScaledRow(row, scale, 0.0, 0.0)
    maxima, plain = scratch.maxima, np.bool_(False)
    token, _ = race(target, proposed, plain, maxima, scratch.bounds, NO_MARGINS, key, position)
    return token


@njit(nogil=True, cache=True)
def _with_dense(proposed, dense):  # type: ignore[no-untyped-def]
    return ProposedRow(proposed.kind, proposed.token, dense, proposed.ids, proposed.probabilities)


@njit(nogil=True, cache=True)
def _log_proposed(proposed):  # type: ignore[no-untyped-def]
    """``log q`` of the draft."""
    if proposed.kind == DENSE:
        return log_probability(proposed.dense, proposed.token)
    if proposed.kind == SPARSE:
        q = sparse_probability(proposed.ids, proposed.probabilities, proposed.token)
        return math.log(q) if q > 0.0 else -np.inf
    return 0.0


@njit(nogil=True, cache=True)
def _normalized(row, scale, shift, total):  # type: ignore[no-untyped-def]
    log_total = math.log(total) if total > 0.0 else 0.0
    return ScaledRow(row, scale, np.float64(shift) * LN_2, log_total)


@njit(nogil=True, cache=True)
def _margin(top, distance):  # type: ignore[no-untyped-def]
    """Above the error of a fast log-probability: of its normaliser, and of a distance that is so
    large that float64 rounds it."""
    return LOG_MARGIN + TOP_MARGIN * abs(top) + 2.0**-50 * abs(distance)


@njit(nogil=True, cache=True)
def _read_proposal(dense, token, limit):  # type: ignore[no-untyped-def]
    """Whether ``log q`` of the token is surely below ``limit``, the proposal with its normaliser if
    it had to be read to its end to say no, and how many logits were read."""
    row, scale = dense.logits, dense.scale
    factor = factor_of(scale)
    scaled = np.float64(row[token]) * scale
    shift, total = shift_of(row[token], factor), 0.0
    stop = 0
    while True:
        if is_bounded(shift, scale) and not math.isinf(scaled):
            top = np.float64(shift) * LN_2
            distance = scaled - top
            needed = math.exp(min(distance - limit + _margin(top, distance), 700.0))
            # Of what has not been read, the draft's own weight is known.
            known = total if token < stop else total + math.exp(distance)
            if known > needed:
                return True, dense, stop
        if stop == row.size:
            return False, _normalized(row, scale, shift, total), stop
        first, stop = stop, min(stop + CHUNK, row.size)
        shift, total = add_chunk(row, factor, first, stop, shift, total)


@njit(nogil=True, cache=True)
def _exact(row, maximum, weights):  # type: ignore[no-untyped-def]
    top = np.float64(maximum) * row.scale
    log_total = exact_log_total(row.logits, row.scale, top, weights)
    return ScaledRow(row.logits, row.scale, top, log_total)


@njit(nogil=True, cache=True)
def _test(row, scale, proposed, key, position, scratch):  # type: ignore[no-untyped-def]
    """Whether a draft stands, the token that its row emits, and how many logits were read."""
    uniform, residual_key = acceptance(key, position)
    log_uniform = math.log(uniform)
    token, maxima, bounds = proposed.token, scratch.maxima, scratch.bounds
    shift, total = fast_total(row, scale, row[token])
    target = _normalized(row, scale, shift, total)
    read = row.size
    bounded = is_bounded(shift, scale)
    log_p = log_probability(target, token)
    margin = _margin(target.top, 0.0 if math.isinf(log_p) else log_p)
    margins = (_margin(target.top, 0.0), 0.0)
    if proposed.kind == DENSE:
        limit = log_p - margin - log_uniform if bounded else -np.inf
        stands, dense, some = _read_proposal(proposed.dense, token, limit)
        read += some
        if stands:
            return True, token, read
        proposed = _with_dense(proposed, dense)
        bounded = bounded and is_bounded(dense.top / LN_2, dense.scale)
        bounded = bounded and not math.isinf(dense.logits[token])
        margins = (margins[0], _margin(dense.top, 0.0))
        margin += _margin(dense.top, _log_proposed(proposed))
    log_ratio = log_p - _log_proposed(proposed)
    if bounded and log_uniform < log_ratio - margin:
        return True, token, read
    maximum = block_maxima(row, maxima)
    residual = np.bool_(True)
    if bounded and log_uniform > log_ratio + margin:
        drawn, certain = race(
            target, proposed, residual, maxima, bounds, margins, residual_key, position
        )
        if certain:
            return False, drawn, read
    target = _exact(target, maximum, scratch.weights)
    if proposed.kind == DENSE:
        maximum = largest(proposed.dense.logits)
        proposed = _with_dense(proposed, _exact(proposed.dense, maximum, scratch.weights))
    if log_uniform < log_probability(target, token) - _log_proposed(proposed):
        return True, token, read
    drawn = np.int64(-1)
    for kind in (proposed.kind, NOWHERE):
        # Rounding can leave nothing of a residual; then the target alone is drawn from.
        if drawn < 0:
            proposed = ProposedRow(
                kind, token, proposed.dense, proposed.ids, proposed.probabilities
            )
            drawn, _ = race(
                target, proposed, residual, maxima, bounds, NO_MARGINS, residual_key, position
            )
    return False, drawn, read


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
    verdict,
    scratch,
):
    """Decides the sequences ``first:last``."""
    accepted, tokens, logits_read = verdict
    bonus = np.int64(rows.bonus)
    for sequence in range(first, last):
        start, stop = rows.offsets[sequence], rows.offsets[sequence + 1]
        scale = 0.0 if mode == GREEDY else rows.inverse_temperature[sequence]
        key, position = rows.key[sequence], rows.position[sequence]
        count = 0
        for row in range(start, stop):
            place = position + np.uint64(row - start)
            draft = row - sequence * bonus
            tested = row < stop - bonus
            token = rows.drafts[draft] if tested else -1
            own = ScaledRow(logits[row], scale, 0.0, 0.0)
            proposed = ProposedRow(CERTAIN, token, own, ids, probabilities)
            stands = False
            if mode == EXACT and scale > 0.0 and tested:
                if kind == DENSE:
                    own = ScaledRow(dense_logits[draft], dense_scales[sequence], 0.0, 0.0)
                    proposed = ProposedRow(DENSE, token, own, ids, probabilities)
                elif kind == SPARSE:
                    part = slice(offsets[draft], offsets[draft + 1])
                    proposed = ProposedRow(SPARSE, token, own, ids[part], probabilities[part])
                stands, tokens[row], read = _test(logits[row], scale, proposed, key, place, scratch)
            else:
                tokens[row] = _draw(logits[row], scale, proposed, scratch, key, place)
                stands = tested and tokens[row] == token
                read = logits.shape[1]
            logits_read[sequence] += read
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
    verdict = (np.zeros(sequences, np.int64), tokens, np.zeros(sequences, np.int64))
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
                verdict,
                VerifyScratch.of(logits.shape[1]),
            )
            for first, last in shares
        ]
    )
    return Verdict(*verdict)
