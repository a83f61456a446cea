"""Softmax denominators of long rows in numba: a fast one with a bound, an exact one on demand.

The fast one is an online softmax (Milakov and Gimelshein 2018): one pass over the logits in chunks,
each of which is read once for its maximum and, from the first-level cache, once for its sum. Its
exponentials are fp32, which is what makes it as fast as memory.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from kernels.blocks import BLOCK
from kernels.decision.maxima import LOWEST_RANK, largest_rank, rank
from kernels.exponential.double_precision import exponential
from kernels.exponential.single_precision import exponential as fast_exponential
from kernels.penalties.cpu import MINUS_INFINITY

CHUNK = 16 * BLOCK
# Above the error of the log of a fast total. Two roundings of a distance of at most 87 (1.1e-5),
# the exponential (2e-7), 1,024 additions in any order (6.2e-5); what lies below -87 weighs less
# than 2**20 e**-87 against 1.
LOG_MARGIN = 1e-4
# Where the product of a distance and the scale, both fp32, is as said.
LEAST_FAST_SCALE, LARGEST_FAST_SCALE = 2.0**-20, 2.0**20


@njit(nogil=True, cache=True)
def largest(logits):  # type: ignore[no-untyped-def]
    return np.int32(rank(largest_rank(logits.view(np.int32)))).view(np.float32)


@njit(nogil=True, cache=True)
def block_maxima(logits, maxima):  # type: ignore[no-untyped-def]
    """Writes the largest of every 64 logits; returns the largest of all."""
    bits = logits.view(np.int32)
    highest = LOWEST_RANK
    whole = bits.size // BLOCK
    # Not a slice for each block: making one takes as long as the search in it.
    blocks = bits[: whole * BLOCK].reshape(whole, BLOCK)
    for block in range(whole):
        maximum = LOWEST_RANK
        for offset in range(BLOCK):
            maximum = max(maximum, rank(blocks[block, offset]))
        maxima[block] = np.int32(rank(maximum)).view(np.float32)
        highest = max(highest, maximum)
    if whole * BLOCK < bits.size:
        maximum = largest_rank(bits[whole * BLOCK :])
        maxima[whole] = np.int32(rank(maximum)).view(np.float32)
        highest = max(highest, maximum)
    return np.int32(rank(highest)).view(np.float32)


@njit(nogil=True, cache=True)
def _weigh(logits, top, scale, weights):  # type: ignore[no-untyped-def]
    # Nothing but this loop, since only loops without sums vectorise in plain arithmetic.
    for index in range(logits.size):
        weights[index] = fast_exponential((logits[index] - top) * scale)


@njit(nogil=True, cache=True)
def _weigh_exactly(logits, top, scale, weights):  # type: ignore[no-untyped-def]
    for index in range(logits.size):
        scaled = np.float64(logits[index]) * scale
        weights[index] = exponential(0.0 if scaled == top else scaled - top)


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _sum(weights):  # type: ignore[no-untyped-def]
    total = weights[0] - weights[0]
    for index in range(weights.size):
        total += weights[index]
    return total


@njit(nogil=True, cache=True)
def survey(row, scale, maxima, weights):  # type: ignore[no-untyped-def]
    """The largest logit of a row [V] and the fast sum of ``exp((l - largest) scale)``.

    Writes the largest of every 64 logits into ``maxima``; ``weights`` [CHUNK] fp32 is scratch.
    """
    top, total = MINUS_INFINITY, 0.0
    single = np.float32(scale)
    for first in range(0, row.size, CHUNK):
        stop = min(first + CHUNK, row.size)
        highest = block_maxima(row[first:stop], maxima[first // BLOCK :])
        if highest > top:
            if total > 0.0:
                total *= math.exp((np.float64(top) - np.float64(highest)) * scale)
            top = highest
        if math.isinf(top):
            continue  # nothing yet, or nothing else matters
        own = weights[: stop - first]
        _weigh(row[first:stop], top, single, own)
        total += np.float64(_sum(own))
    return top, total


@njit(nogil=True, cache=True)
def is_bounded(top, scale):  # type: ignore[no-untyped-def]
    """Whether the log of `survey`'s sum is within LOG_MARGIN."""
    return not math.isinf(top) and LEAST_FAST_SCALE <= scale <= LARGEST_FAST_SCALE


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
        total += _sum(own)
    return math.log(total)
