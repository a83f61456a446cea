"""Block maxima in numba, by integers that order like the numbers: maxima of these vectorise."""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK

MAGNITUDE = np.int32(0x7FFFFFFF)
LOWEST_RANK = np.int32(-0x80000000)


@njit(nogil=True, cache=True, inline="always")
def greater(left, right):  # type: ignore[no-untyped-def]
    """`max` without its care for NaN, which does not vectorise."""
    return left if left > right else right


@njit(nogil=True, cache=True, inline="always")
def rank(bits):  # type: ignore[no-untyped-def]
    """The bits of an fp32 number as an int32 that orders like it (-0.0 below 0.0), and back.

    Unlike maxima of numbers, maxima of integers vectorise.
    """
    return bits ^ ((bits >> np.int32(31)) & MAGNITUDE)


@njit(nogil=True, cache=True)
def largest_rank(bits):  # type: ignore[no-untyped-def]
    highest = rank(bits[0])
    for index in range(bits.size):
        highest = max(highest, rank(bits[index]))
    return highest


@njit(nogil=True, cache=True)
def block_maxima(logits):  # type: ignore[no-untyped-def]
    """The largest of every 64 ``logits`` of each row [B, V]; NaN where one of them is."""
    rows, size = logits.shape
    result = np.empty((rows, (size + BLOCK - 1) // BLOCK), np.float32)
    for row in range(rows):
        bits = logits[row].view(np.int32)
        for block in range(result.shape[1]):
            highest = largest_rank(bits[block * BLOCK : min(block * BLOCK + BLOCK, size)])
            result[row, block] = np.int32(rank(highest)).view(np.float32)
    return result
