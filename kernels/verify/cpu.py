"""Verification in numba, rows shared among threads.

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
from lexshard.kernels.block_maxima import block_maxima
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.exponential.bounded_sum import factor_of, shift_of
from lexshard.kernels.noise.cpu import TWELVE, TWENTY, ZERO, philox
from lexshard.kernels.noise.reference import HALF
from lexshard.kernels.verify.normalizer import (
    CHUNK,
    LN_2,
    LOG_MARGIN,
    TOP_MARGIN,
    add_chunk,
    exact_log_total,
    fast_total,
    is_bounded,
    largest,
)
from lexshard.kernels.verify.race import (
    CERTAIN,
    DENSE,
    NOWHERE,
    ProposedRow,
    ScaledRow,
    log_probability,
    race,
)
from lexshard.kernels.verify.reference import ACCEPTANCE_LANE
from lexshard.kernels.verify.sigmoid import SigmoidRow, emitted_by_sigmoid
from lexshard.kernels.verify.types import (
    DraftedRows,
    Limits,
    Proposals,
    Verdict,
)

LANE = np.uint64(ACCEPTANCE_LANE)
NO_LOGITS = np.empty((0, 0), np.float32)
NO_SCALES = np.empty(0, np.float64)
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
def _with_dense(proposed, dense):  # type: ignore[no-untyped-def]
    return ProposedRow(proposed.kind, proposed.token, dense)


@njit(nogil=True, cache=True)
def _log_proposed(proposed):  # type: ignore[no-untyped-def]
    """``log q`` of the draft."""
    if proposed.kind == DENSE:
        return log_probability(proposed.dense, proposed.token)
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
    """The token that the row of a draft emits, and how many logits were read."""
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
            return token, read
        proposed = _with_dense(proposed, dense)
        bounded = bounded and is_bounded(dense.top / LN_2, dense.scale)
        bounded = bounded and not math.isinf(dense.logits[token])
        margins = (margins[0], _margin(dense.top, 0.0))
        margin += _margin(dense.top, _log_proposed(proposed))
    log_ratio = log_p - _log_proposed(proposed)
    if bounded and log_uniform < log_ratio - margin:
        return token, read
    maximum = block_maxima(row, maxima)
    if bounded and log_uniform > log_ratio + margin:
        drawn, certain = race(target, proposed, maxima, bounds, margins, residual_key, position)
        if certain:
            return drawn, read
    target = _exact(target, maximum, scratch.weights)
    if proposed.kind == DENSE:
        maximum = largest(proposed.dense.logits)
        proposed = _with_dense(proposed, _exact(proposed.dense, maximum, scratch.weights))
    if log_uniform < log_probability(target, token) - _log_proposed(proposed):
        return token, read
    drawn = np.int64(-1)
    for kind in (proposed.kind, NOWHERE):
        # Rounding can leave nothing of a residual; then the target alone is drawn from.
        if drawn < 0:
            proposed = ProposedRow(kind, token, proposed.dense)
            drawn, _ = race(target, proposed, maxima, bounds, NO_MARGINS, residual_key, position)
    return drawn, read


@njit(nogil=True, cache=True)
def _verify(  # type: ignore[no-untyped-def]
    logits, rows, dense_logits, dense_scales, verdict, scratch, first, last
):
    """Decides the rows ``first:last``; without scales the drafter was certain."""
    for row in range(first, last):
        token = rows.drafts[row]
        own = ScaledRow(logits[row], rows.inverse_temperature[row], 0.0, 0.0)
        proposed = ProposedRow(CERTAIN, token, own)
        if dense_scales.size > 0:
            own = ScaledRow(dense_logits[row], dense_scales[row], 0.0, 0.0)
            proposed = ProposedRow(DENSE, token, own)
        verdict.tokens[row], verdict.logits_read[row] = _test(
            logits[row],
            rows.inverse_temperature[row],
            proposed,
            rows.key[row],
            rows.position[row],
            scratch,
        )


@njit(nogil=True, cache=True)
def _verify_by_sigmoid(  # type: ignore[no-untyped-def]
    logits, rows, dense_logits, dense_scales, limits, verdict, bounds, first, last
):
    """Decides the rows ``first:last``."""
    for row in range(first, last):
        p = SigmoidRow(logits[row], rows.inverse_temperature[row])
        q = SigmoidRow(dense_logits[row], dense_scales[row])
        uniform, residual_key = acceptance(rows.key[row], rows.position[row])
        verdict.tokens[row], verdict.logits_read[row] = emitted_by_sigmoid(
            p,
            q,
            limits,
            rows.drafts[row],
            math.log(uniform),
            residual_key,
            rows.position[row],
            bounds,
        )


def verify(
    logits: npt.NDArray[np.float32],
    rows: DraftedRows,
    proposals: Proposals,
    sigmoid: Limits | None,
) -> Verdict:
    count, size = logits.shape
    verdict = Verdict(np.empty(count, np.int64), np.empty(count, np.int64))
    dense = NO_LOGITS, NO_SCALES
    if proposals is not None:
        dense = proposals.logits, proposals.inverse_temperature

    def decide(first: int, last: int) -> None:
        scratch = VerifyScratch.of(size)
        if sigmoid is None:
            _verify(logits, rows, *dense, verdict, scratch, first, last)
        else:
            limits = (float(sigmoid[0]), float(sigmoid[1]))
            _verify_by_sigmoid(logits, rows, *dense, limits, verdict, scratch.bounds, first, last)

    shares = pool.even_shares([1] * count, pool.threads())
    pool.run([partial(decide, first, last) for first, last in shares])
    return verdict
