"""The adjustment in numba: of candidate lists, of blocks of tokens, of bounds on blocks.

Nothing here walks over a history: what was seen is looked up by token.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.block_vectors import EVERY, exclude
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.masks import allows

MINUS_INFINITY = np.float32(-np.inf)
NO_TABLE = np.empty(0, np.int32)
NO_WORDS = np.empty(0, np.uint64)


@njit(nogil=True, cache=True)
def gallop(values, start, stop, wanted):  # type: ignore[no-untyped-def]
    """First index in ``start:stop`` of sorted ``values`` that is not below ``wanted``.

    Steps double, then halve: cheap both when the next value is near and when the list is long.
    """
    step = 1
    low = start
    high = start
    while high < stop and values[high] < wanted:
        low = high + 1
        high += step
        step *= 2
    high = min(high, stop)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True, inline="always")
def penalise(logit, repetition, frequency, presence, count):  # type: ignore[no-untyped-def]
    """The penalties of one seen token, all fp32."""
    logit = logit / repetition if logit > np.float32(0.0) else logit * repetition
    if count > 0:
        logit = logit - frequency * np.float32(count)
        logit = logit - presence
    return logit


@njit(nogil=True, cache=True, inline="always")
def raised(logit, row, a, most):  # type: ignore[no-untyped-def]
    """Bounds the penalised logit of every token of the row whose raw logit ``logit`` bounds, if
    none stands more than ``most`` times in the output: `penalise` is monotone in the count.

    The logit itself where penalties can only lower. Biases are the caller's affair.
    """
    if a.table[row] < 0:
        return logit
    repetition, frequency, presence = a.repetition[row], a.frequency[row], a.presence[row]
    if repetition >= 1.0 and frequency >= 0.0 and presence >= 0.0:
        return logit
    highest = max(logit, penalise(logit, repetition, frequency, presence, 0))
    highest = max(highest, penalise(logit, repetition, frequency, presence, 1))
    return max(highest, penalise(logit, repetition, frequency, presence, most))


@njit(nogil=True, cache=True)
def most_repeated(row, a):  # type: ignore[no-untyped-def]
    """What `raised` is to take for ``most``: the largest output count where more occurrences raise
    a logit more (one pass over the table), otherwise 1."""
    most = 1
    if a.table[row] >= 0 and a.frequency[row] < 0.0:
        table = a.tables[a.table[row]]
        for token in range(table.size):
            most = max(most, table[token] - 1)
    return most


@njit(nogil=True, cache=True)
def lower_bound(values, start, stop, wanted):  # type: ignore[no-untyped-def]
    """First index in ``start:stop`` of sorted ``values`` that is not below ``wanted``."""
    low, high = start, stop
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _place(values, start, stop, wanted):  # type: ignore[no-untyped-def]
    """Where sorted ``values`` has ``wanted`` in ``start:stop``, -1 where it has not."""
    place = lower_bound(values, start, stop, wanted)
    return place if place < stop and values[place] == wanted else -1


# Inlined: passing all these arrays on to another function costs more than the function does.
@njit(nogil=True, cache=True, inline="always")
def adjust_allowed_token(logit, token, row, a):  # type: ignore[no-untyped-def]
    """`adjust_token` of a token that the row's mask, if it has one, holds."""
    if _place(a.banned, a.banned_offsets[row], a.banned_offsets[row + 1], token) >= 0:
        logit = MINUS_INFINITY
    bias = _place(a.bias_ids, a.bias_offsets[row], a.bias_offsets[row + 1], token)
    if bias >= 0:
        logit = logit + a.bias_values[bias]
    entry = a.tables[a.table[row], token] if a.table[row] >= 0 else np.int32(0)
    if entry > 0:
        logit = penalise(logit, a.repetition[row], a.frequency[row], a.presence[row], entry - 1)
    return logit


@njit(nogil=True, cache=True, inline="always")
def adjust_token(logit, token, row, a):  # type: ignore[no-untyped-def]
    """The adjusted fp32 ``logit`` of one token, minus infinity where the row excludes it."""
    if a.mask[row] >= 0 and not allows(a.masks[a.mask[row]], token):
        logit = MINUS_INFINITY
    return adjust_allowed_token(logit, token, row, a)


@njit(nogil=True, cache=True)
def adjust_tokens(ids, logits, row, a):  # type: ignore[no-untyped-def]
    """Replaces ``logits`` [n] of the tokens ``ids`` [n], which are sorted, by their adjusted
    values."""
    # Taken out first, since a field costs more to look up than what is done with it here.
    first, last = a.bias_offsets[row], a.bias_offsets[row + 1]
    bias_ids, bias_values, bias = a.bias_ids[first:last], a.bias_values[first:last], 0
    banned_ids, banned = a.banned[a.banned_offsets[row] : a.banned_offsets[row + 1]], 0
    masked, penalised = a.mask[row] >= 0, a.table[row] >= 0
    words = a.masks[a.mask[row]] if masked else NO_WORDS
    table = a.tables[a.table[row]] if penalised else NO_TABLE
    repetition, frequency, presence = a.repetition[row], a.frequency[row], a.presence[row]
    for index in range(ids.size):
        token, logit = ids[index], logits[index]
        if bias_ids.size > 0:
            bias = gallop(bias_ids, bias, bias_ids.size, token)
            if bias < bias_ids.size and bias_ids[bias] == token:
                logit = logit + bias_values[bias]
        if penalised and table[token] > 0:
            logit = penalise(logit, repetition, frequency, presence, table[token] - 1)
        if banned_ids.size > 0:
            banned = gallop(banned_ids, banned, banned_ids.size, token)
            if banned < banned_ids.size and banned_ids[banned] == token:
                logit = MINUS_INFINITY
        if masked and not allows(words, token):
            logit = MINUS_INFINITY
        logits[index] = logit


@njit(nogil=True, cache=True)
def adjust(ids, logits, offsets, a):  # type: ignore[no-untyped-def]
    """See `kernels.penalties.adjust`."""
    result = logits.copy()
    for row in range(offsets.size - 1):
        if a.active[row]:
            own = slice(offsets[row], offsets[row + 1])
            adjust_tokens(ids[own], result[own], row, a)
    return result


@njit(nogil=True, cache=True)
def _penalise_block(logits, table, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    """`penalise` without branches, so that it vectorises; ``table`` has an entry per logit."""
    for index in range(logits.size):
        logit, entry = logits[index], table[index]
        repeated = logit / repetition if logit > np.float32(0.0) else logit * repetition
        lowered = (repeated - frequency * np.float32(entry - 1)) - presence
        seen = lowered if entry > 1 else repeated
        logits[index] = seen if entry > 0 else logit


@njit(nogil=True, cache=True, inline="always")
def adjust_block(logits, first, row, a):  # type: ignore[no-untyped-def]
    """Replaces ``logits`` [n] of the tokens from ``first`` on by their adjusted values.

    Where they bound raw logits on one side they then bound the adjusted logits on the same side,
    since every processor is monotone with its roundings.
    """
    stop = first + logits.size
    end = a.bias_offsets[row + 1]
    index = lower_bound(a.bias_ids, a.bias_offsets[row], end, first)
    while index < end and a.bias_ids[index] < stop:
        place = a.bias_ids[index] - first
        logits[place] = logits[place] + a.bias_values[index]
        index += 1
    if a.table[row] >= 0:
        table = a.tables[a.table[row], first:stop]
        _penalise_block(logits, table, a.repetition[row], a.frequency[row], a.presence[row])
    end = a.banned_offsets[row + 1]
    index = lower_bound(a.banned, a.banned_offsets[row], end, first)
    while index < end and a.banned[index] < stop:
        logits[a.banned[index] - first] = MINUS_INFINITY
        index += 1
    if a.mask[row] >= 0:
        words, place = a.masks[a.mask[row]], 0
        while place < logits.size:
            block, before = divmod(first + place, BLOCK)
            if before == 0 and place + BLOCK <= logits.size:
                if words[block] != EVERY:
                    exclude(logits, place, words[block])
                place += BLOCK
            else:
                if not allows(words, first + place):
                    logits[place] = MINUS_INFINITY
                place += 1
