"""Softmax denominators of long rows in numba: a fast one with a bound, an exact one on demand.

The fast one is an online softmax (Milakov and Gimelshein 2018) that hardly ever looks for a
maximum: weights are taken relative to a logit that the caller knows (that of the draft), and only
where their sum grows beyond what fp32 holds well does the largest logit of the chunk take its
place. So a row is read once, as fast as memory gives it, and the sum of the chunks so far bounds
the denominator from below before the row has ended.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels import ordered_sums
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.decision.maxima import largest_rank, rank
from lexshard.kernels.exponential.bounded_sum import (
    LARGEST_SHIFT,
    STEP,
    factor_of,
    shift_of,
    sum_of_exponentials,
)
from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.penalties.cpu import MINUS_INFINITY

CHUNK = 64 * BLOCK
# Above the error of the log of a fast total with shift 0, and what a unit of its top adds to it
# (`kernels.exponential.bounded_sum.relative_error`).
LOG_MARGIN, TOP_MARGIN = 2.5e-5, 1.5e-7
# Sums of a chunk stay below this: far from what fp32 holds.
LARGEST_SUM = 2.0**60
# Where the factor of an exponent is an fp32 number without surprises.
LEAST_FAST_SCALE, LARGEST_FAST_SCALE = 2.0**-20, 2.0**20
LN_2 = math.log(2.0)


@njit(nogil=True, cache=True)
def largest(logits):  # type: ignore[no-untyped-def]
    return np.int32(rank(largest_rank(logits.view(np.int32)))).view(np.float32)


@njit(nogil=True, cache=True)
def _sum_of_chunk(row, first, stop, shift, factor):  # type: ignore[no-untyped-def]
    whole = first + (stop - first) // STEP * STEP
    total = np.float64(sum_of_exponentials(row, first, whole, shift, factor))
    if whole < stop:
        rest = np.empty(STEP, np.float32)
        for index in range(STEP):
            rest[index] = row[whole + index] if whole + index < stop else MINUS_INFINITY
        total += np.float64(sum_of_exponentials(rest, 0, STEP, shift, factor))
    return total


@njit(nogil=True, cache=True)
def add_chunk(row, factor, first, stop, shift, total):  # type: ignore[no-untyped-def]
    """The shift and the sum of ``2**(l factor - shift)`` with the logits ``first:stop`` added, at
    most CHUNK of them. Begin with a total of 0 and the shift of any logit of the row (`shift_of`,
    which is ``-inf`` for an excluded one); it never falls.
    """
    if shift == MINUS_INFINITY:
        shift = shift_of(largest(row[first:stop]), factor)
    if not abs(shift) <= LARGEST_SHIFT:
        return shift, total  # nothing yet, or nothing that fp32 can tell apart
    own = _sum_of_chunk(row, first, stop, shift, factor)
    if not own < LARGEST_SUM:
        raised = shift_of(largest(row[first:stop]), factor)
        total *= math.exp((np.float64(shift) - np.float64(raised)) * LN_2)
        shift = raised
        own = 0.0
        if abs(shift) <= LARGEST_SHIFT:
            own = _sum_of_chunk(row, first, stop, shift, factor)
    return shift, total + own


@njit(nogil=True, cache=True)
def fast_total(row, scale, logit):  # type: ignore[no-untyped-def]
    """The shift and the sum of ``2**(l scale / ln 2 - shift)`` over a row [V], given any logit of
    it. The log of the sum is within LOG_MARGIN + TOP_MARGIN ``|shift| ln 2`` where `is_bounded`."""
    factor = factor_of(scale)
    shift, total = shift_of(logit, factor), 0.0
    for first in range(0, row.size, CHUNK):
        stop = min(first + CHUNK, row.size)
        shift, total = add_chunk(row, factor, first, stop, shift, total)
    return shift, total


@njit(nogil=True, cache=True)
def is_bounded(shift, scale):  # type: ignore[no-untyped-def]
    """Whether a fast total has a bound on its error."""
    return abs(shift) <= LARGEST_SHIFT and LEAST_FAST_SCALE <= scale <= LARGEST_FAST_SCALE


@njit(nogil=True, cache=True)
def _weigh_exactly(logits, top, scale, weights):  # type: ignore[no-untyped-def]
    # Nothing but this loop, since only loops without sums vectorise in plain arithmetic.
    for index in range(logits.size):
        scaled = np.float64(logits[index]) * scale
        weights[index] = exponential(0.0 if scaled == top else scaled - top)


@njit(nogil=True, cache=True)
def exact_log_total(row, scale, top, weights):  # type: ignore[no-untyped-def]
    """``log(sum(exp(l scale - top)))`` in float64, where ``top`` is the largest ``l scale``.

    ``weights`` [CHUNK] float64 is scratch; infinite logits count 1 each.
    """
    if top == -np.inf:
        return np.inf  # no token has any probability
    total = 0.0
    for first in range(0, row.size, CHUNK):
        stop = min(first + CHUNK, row.size)
        own = weights[: stop - first]
        _weigh_exactly(row[first:stop], top, scale, own)
        total += ordered_sums.total(own)
    return math.log(total)
