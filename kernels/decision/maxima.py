"""Block maxima in numba: vectorised down the columns or across them, whichever is contiguous."""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK

# Fewer columns side by side than this are not worth a loop of their own.
FEW = 16
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
def _raise(highest, bits):  # type: ignore[no-untyped-def]
    """Raises every rank in ``highest`` to that of ``bits``."""
    for lane in range(highest.size):
        highest[lane] = max(highest[lane], rank(bits[lane]))


@njit(nogil=True, cache=True)
def _across(bits, step, size, result):  # type: ignore[no-untyped-def]
    """The maxima of columns that lie side by side; rows are ``step`` apart."""
    blocks, columns = result.shape
    for block in range(blocks):
        highest = result[block]
        highest[:] = LOWEST_RANK
        for index in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
            _raise(highest, bits[index * step : index * step + columns])


@njit(nogil=True, cache=True)
def _packed(bits, columns, size, result):  # type: ignore[no-untyped-def]
    """The same for few columns without gaps: eight rows make one long one."""
    width = 8 * columns
    highest = np.empty(width, np.int32)
    for block in range(result.shape[0]):
        start = block * BLOCK
        stop = min(start + BLOCK, size)
        done = start + (stop - start) // 8 * 8
        highest[:] = LOWEST_RANK
        for index in range(start, done, 8):
            _raise(highest, bits[index * columns : index * columns + width])
        for index in range(done, stop):
            _raise(highest[:columns], bits[index * columns : (index + 1) * columns])
        for column in range(columns):
            best = LOWEST_RANK
            for lane in range(column, width, columns):
                best = max(best, highest[lane])
            result[block, column] = best


@njit(nogil=True, cache=True)
def block_maxima(memory, strides, size, columns):  # type: ignore[no-untyped-def]
    """``memory[i * strides[0] + c * strides[1]]`` is the logit of token ``i`` in column ``c``."""
    bits = memory.view(np.int32)
    down, across = strides
    ranks = np.empty(((size + BLOCK - 1) // BLOCK, columns), np.int32)
    if across == 1 and down == columns and 1 < columns < FEW:
        _packed(bits, columns, size, ranks)
    elif across == 1 and columns > 1:
        _across(bits, down, size, ranks)
    else:
        for column in range(columns):
            for block in range(ranks.shape[0]):
                first = column * across + block * BLOCK * down
                last = column * across + (min(block * BLOCK + BLOCK, size) - 1) * down
                if down == 1:
                    ranks[block, column] = largest_rank(bits[first : last + 1])
                else:
                    ranks[block, column] = largest_rank(bits[first : last + 1 : down])
    result = np.empty(ranks.shape, np.float32)
    for block in range(ranks.shape[0]):
        for column in range(columns):
            result[block, column] = np.int32(rank(ranks[block, column])).view(np.float32)
    return result
