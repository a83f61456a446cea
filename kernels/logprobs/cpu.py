"""Scores of rows in numba: a row stays in the cache while it is ranked, searched and summed."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.penalties.cpu import MINUS_INFINITY


# The flags let the maximum vectorise; no logit is NaN, and the sign of a zero does not matter.
@njit(nogil=True, cache=True, fastmath={"nnan", "nsz"})
def _survey(row, logit, maxima):  # type: ignore[no-untyped-def]
    """Writes the largest of every 64 logits; how many logits of the row are above ``logit``."""
    above = 0
    for block in range(maxima.size):
        part = row[block * BLOCK : (block + 1) * BLOCK]
        highest = MINUS_INFINITY
        for index in range(part.size):
            highest = max(highest, part[index])
        count = np.int32(0)
        for index in range(part.size):
            count += np.int32(part[index] > logit)
        maxima[block] = highest
        above += count
    return above


@njit(nogil=True, cache=True)
def _insert(value, index, kept, values, ids):  # type: ignore[no-untyped-def]
    """Puts a value into the list of the best ones, after those that equal it; ``kept`` are in it,
    and where it is full the last one falls out."""
    place = min(kept, values.size - 1)
    while place > 0 and values[place - 1] < value:
        values[place] = values[place - 1]
        ids[place] = ids[place - 1]
        place -= 1
    values[place] = value
    ids[place] = index


@njit(nogil=True, cache=True)
def _best(row, maxima, values, ids):  # type: ignore[no-untyped-def]
    """Fills ``values`` and ``ids`` [k] with the k best logits, ties to the lower id."""
    count = values.size
    least = MINUS_INFINITY
    if count <= maxima.size:
        # The k best maxima belong to k logits: none below the last of them is among the k best.
        for block in range(maxima.size):
            if block < count or maxima[block] > values[count - 1]:
                _insert(maxima[block], block, min(block, count), values, ids)
        least = values[count - 1]
    kept = 0
    for block in range(maxima.size):
        if maxima[block] < least:
            continue
        for token in range(block * BLOCK, min(block * BLOCK + BLOCK, row.size)):
            value = row[token]
            if value < least or (kept == count and value <= values[count - 1]):
                continue
            _insert(value, token, kept, values, ids)
            kept = min(kept + 1, count)


@njit(nogil=True, cache=True)
def _log_normalizer(row, largest, weights):  # type: ignore[no-untyped-def]
    """That of `kernels.exponential`, whose order of additions it keeps."""
    top = np.float64(largest)
    if math.isinf(top):
        return top
    for index in range(row.size):
        weights[index] = exponential(np.float64(row[index]) - top)
    total = 0.0
    for index in range(row.size):
        total += weights[index]
    return top + math.log(total)


@njit(nogil=True, cache=True)
def score_rows(logits, token_ids, count, maxima):  # type: ignore[no-untyped-def]
    rows, size = logits.shape
    logprob = np.empty(rows, np.float64)
    rank = np.empty(rows, np.int64)
    ids = np.empty((rows, count), np.int64)
    logprobs = np.empty((rows, count), np.float64)
    values = np.empty(count, np.float32)
    weights = np.empty(size, np.float64)
    for row in range(rows):
        own = logits[row]
        logit = own[token_ids[row]]
        rank[row] = 1 + _survey(own, logit, maxima)
        normalizer = _log_normalizer(own, maxima.max(), weights)
        logprob[row] = np.float64(logit) - normalizer
        if count > 0:
            _best(own, maxima, values, ids[row])
            for place in range(count):
                logprobs[row, place] = np.float64(values[place]) - normalizer
    return logprob, rank, ids, logprobs
