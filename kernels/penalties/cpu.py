"""The adjustment in numba: for short candidate lists, and for whole rows of bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numba import njit

if TYPE_CHECKING:
    from kernels.penalties import Adjustments

MINUS_INFINITY = np.float32(-np.inf)


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


@njit(nogil=True, cache=True)
def adjust_candidates(ids, logits, offsets, a):  # type: ignore[no-untyped-def]
    result = logits.copy()
    for row in range(offsets.size - 1):
        if not a.active[row]:
            continue
        seen, seen_end = a.seen_offsets[row], a.seen_offsets[row + 1]
        bias, bias_end = a.bias_offsets[row], a.bias_offsets[row + 1]
        banned, banned_end = a.banned_offsets[row], a.banned_offsets[row + 1]
        allowed, allowed_end = a.allowed_offsets[row], a.allowed_offsets[row + 1]
        repetition, frequency = a.repetition[row], a.frequency[row]
        presence, restricted = a.presence[row], a.restricted[row]
        for index in range(offsets[row], offsets[row + 1]):
            token = ids[index]
            banned = gallop(a.banned, banned, banned_end, token)
            if banned < banned_end and a.banned[banned] == token:
                result[index] = MINUS_INFINITY
                continue
            if restricted:
                allowed = gallop(a.allowed, allowed, allowed_end, token)
                if allowed == allowed_end or a.allowed[allowed] != token:
                    result[index] = MINUS_INFINITY
                    continue
            logit = result[index]
            bias = gallop(a.bias_ids, bias, bias_end, token)
            if bias < bias_end and a.bias_ids[bias] == token:
                logit = logit + a.bias_values[bias]
            seen = gallop(a.seen_ids, seen, seen_end, token)
            if seen < seen_end and a.seen_ids[seen] == token:
                logit = penalise(logit, repetition, frequency, presence, a.output_counts[seen])
            result[index] = logit
    return result


@njit(nogil=True, cache=True)
def adjust_row(result, row, a):  # type: ignore[no-untyped-def]
    """Replaces every ``result[i]`` of one row by its adjusted value.

    Where ``result`` bounds the raw logits on one side it then bounds the adjusted logits on the
    same side, since every processor is monotone with its roundings.
    """
    size = result.size
    if a.restricted[row]:
        start = 0
        for index in range(a.allowed_offsets[row], a.allowed_offsets[row + 1]):
            token = min(np.int64(a.allowed[index]), size)
            result[start:token] = MINUS_INFINITY
            start = token + 1
        result[start:] = MINUS_INFINITY
    for index in range(a.banned_offsets[row], a.banned_offsets[row + 1]):
        if a.banned[index] < size:
            result[a.banned[index]] = MINUS_INFINITY
    for index in range(a.bias_offsets[row], a.bias_offsets[row + 1]):
        token = a.bias_ids[index]
        if token < size:
            result[token] = result[token] + a.bias_values[index]
    repetition, frequency, presence = a.repetition[row], a.frequency[row], a.presence[row]
    for index in range(a.seen_offsets[row], a.seen_offsets[row + 1]):
        token = a.seen_ids[index]
        if token < size:
            count = a.output_counts[index]
            result[token] = penalise(result[token], repetition, frequency, presence, count)


def adjust(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    adjustments: Adjustments,
) -> npt.NDArray[np.float32]:
    return adjust_candidates(ids, logits, offsets, adjustments)
