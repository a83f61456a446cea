"""Truncation in numba: selection by digits of the logits, weighted by mass for top-p."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.search.selection import kth_largest_key, order_key
from lexshard.kernels.truncate.reference import MASS_UNIT

# Bits of one digit: wide digits leave less for the next round, narrow ones have a short tally.
WIDE_DIGIT, NARROW_DIGIT, MANY = 11, 8, 4096


@njit(nogil=True, cache=True)
def _keep_top_k(logits, k, keep, kept):  # type: ignore[no-untyped-def]
    """Reduces ``keep`` (with ``kept`` > k tokens in it) to the k best."""
    keys = np.empty(kept, np.int64)
    count = 0
    for index in range(logits.size):
        if keep[index]:
            keys[count] = order_key(logits[index])
            count += 1
    boundary = kth_largest_key(keys, count, k)
    ties = k
    for index in range(logits.size):
        if keep[index] and order_key(logits[index]) > boundary:
            ties -= 1
    for index in range(logits.size):
        if keep[index]:
            key = order_key(logits[index])
            if key < boundary:
                keep[index] = False
            elif key == boundary:
                keep[index] = ties > 0
                ties -= 1


@njit(nogil=True, cache=True)
def boundary_key(keys, masses, count, target):  # type: ignore[no-untyped-def]
    """The key at which the mass of the best tokens reaches ``target``, and the mass above it.

    ``keys[:count]`` and ``masses[:count]`` are scratch.
    """
    tally = np.empty(1 << WIDE_DIGIT, np.int64)
    # Digits of the distance to the lowest key, so that the first one tells the keys apart.
    lowest = keys[:count].min()
    span = keys[:count].max() - lowest
    shift = 0
    while span >> shift:
        shift += 1
    above = 0
    while shift > 0:
        width = min(WIDE_DIGIT if count >= MANY else NARROW_DIGIT, shift)
        shift -= width
        mask = (1 << width) - 1
        tally[: mask + 1] = 0
        for index in range(count):
            tally[((keys[index] - lowest) >> shift) & mask] += masses[index]
        digit = mask
        while above + tally[digit] < target:
            above += tally[digit]
            digit -= 1
        kept = 0
        for index in range(count):
            if ((keys[index] - lowest) >> shift) & mask == digit:
                keys[kept] = keys[index]
                masses[kept] = masses[index]
                kept += 1
        count = kept
    return keys[0], masses[0], above


@njit(nogil=True, cache=True)
def weigh(logits, scale, top, masses):  # type: ignore[no-untyped-def]
    """Writes every token's mass; ``top`` is the largest ``l s``."""
    # Nothing but this loop, since only loops without branches vectorise.
    for index in range(logits.size):
        scaled = np.float64(logits[index]) * scale
        distance = 0.0 if scaled == top else scaled - top
        masses[index] = np.int64(np.rint(exponential(distance) * MASS_UNIT))


@njit(nogil=True, cache=True)
def target_mass(top_p, total):  # type: ignore[no-untyped-def]
    """What the tokens kept must hold of the mass ``total``."""
    return min(max(np.int64(math.ceil(top_p * np.float64(total))), 1), total)


@njit(nogil=True, cache=True)
def nucleus_end(logits, masses, target):  # type: ignore[no-untyped-def]
    """Where the fewest best tokens that hold the mass ``target`` end: the key of their lowest
    logit, how many of the tokens that equal it are kept (the lower places), and what all hold."""
    keys, weights = np.empty(logits.size, np.int64), np.empty(logits.size, np.int64)
    count = 0
    for index in range(logits.size):
        keys[count] = order_key(logits[index])
        weights[count] = masses[index]
        count += masses[index] > 0
    boundary, mass, above = boundary_key(keys, weights, count, target)
    ties = (target - above + mass - 1) // mass
    return boundary, ties, above + ties * mass


@njit(nogil=True, cache=True)
def _keep_top_p(logits, scale, top, top_p, keep):  # type: ignore[no-untyped-def]
    """Reduces ``keep`` to the fewest best tokens that hold ``top_p`` of its mass."""
    masses = np.empty(logits.size, np.int64)
    weigh(logits, scale, top, masses)
    total = 0
    for index in range(logits.size):
        masses[index] = masses[index] if keep[index] else 0
        total += masses[index]
    boundary, ties, _ = nucleus_end(logits, masses, target_mass(top_p, total))
    for index in range(logits.size):
        if keep[index]:
            key = order_key(logits[index])
            if key < boundary:
                keep[index] = False
            elif key == boundary:
                keep[index] = ties > 0
                ties -= 1


# The flags let the maximum vectorise; no logit is NaN, and the sign of a zero does not matter.
@njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})
def largest(logits):  # type: ignore[no-untyped-def]
    result = MINUS_INFINITY
    for index in range(logits.size):
        result = max(result, logits[index])
    return result


@njit(nogil=True, cache=True)
def truncate_row(logits, scale, top_k, top_p, log_min_p, keep):  # type: ignore[no-untyped-def]
    """Fills ``keep`` [n]; ``log_min_p`` is ``-inf`` where min-p is off. True if any token stays."""
    highest = largest(logits)
    if highest == MINUS_INFINITY:
        keep[:] = False
        return False
    top = np.float64(highest) * scale
    # Not top + log_min_p alone: an infinite logit would make it NaN where min-p is off.
    least = top + log_min_p if log_min_p > -np.inf else log_min_p
    kept = 0
    for index in range(logits.size):
        logit = logits[index]
        stays = logit > MINUS_INFINITY and np.float64(logit) * scale >= least
        keep[index] = stays
        kept += stays
    if 0 < top_k < kept:
        _keep_top_k(logits, top_k, keep, kept)
    if top_p < 1.0:
        _keep_top_p(logits, scale, top, top_p, keep)
    return True


@njit(nogil=True, cache=True)
def best(logits, count):  # type: ignore[no-untyped-def]
    """The places of the ``count`` largest logits, at least one, ascending."""
    keep = np.ones(logits.size, np.bool_)
    if count < logits.size:
        _keep_top_k(logits, count, keep, logits.size)
    return np.flatnonzero(keep)
