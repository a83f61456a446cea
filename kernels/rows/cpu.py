"""Canonical logits in numba: tiles of weight rows x hidden rows held in vector registers.

A tile keeps 12 vectors of sums at most, so that the sums and what they are made of fit the 16
registers of AVX2. Many hidden rows go three at a time per weight row; a single one takes two
weight rows at a time, so that its chains of additions overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.rows.lanes import LANES, tile

# So many weight rows stay in the cache while all hidden rows pass over them.
PANEL = 16


@njit(nogil=True, cache=True)
def gather(hidden, weight, ids, offsets):  # type: ignore[no-untyped-def]
    result = np.empty(ids.size, np.float32)
    for row in range(hidden.shape[0]):
        index = offsets[row]
        end = offsets[row + 1]
        while index + 1 < end:
            pair = (np.int64(ids[index]), np.int64(ids[index + 1]))
            first, second = tile(weight, pair, hidden, (row,))
            result[index] = np.float32(first)
            result[index + 1] = np.float32(second)
            index += 2
        if index < end:
            result[index] = np.float32(tile(weight, (np.int64(ids[index]),), hidden, (row,))[0])
    return result


@njit(nogil=True, cache=True)
def _all_rows(hidden, weight):  # type: ignore[no-untyped-def]
    count = hidden.shape[0]
    size = weight.shape[0]
    result = np.empty((count, size), np.float32)
    for start in range(0, size, PANEL):
        stop = min(start + PANEL, size)
        row = 0
        while row + 2 < count:
            for token in range(start, stop):
                a, b, c = tile(weight, (token,), hidden, (row, row + 1, row + 2))
                result[row, token] = np.float32(a)
                result[row + 1, token] = np.float32(b)
                result[row + 2, token] = np.float32(c)
            row += 3
        while row < count:
            token = start
            while token + 1 < stop:
                a, b = tile(weight, (token, token + 1), hidden, (row,))
                result[row, token] = np.float32(a)
                result[row, token + 1] = np.float32(b)
                token += 2
            if token < stop:
                result[row, token] = np.float32(tile(weight, (token,), hidden, (row,))[0])
            row += 1
    return result


def canonical_logits(
    hidden: npt.NDArray[np.float32],
    weight: npt.NDArray[Any],
    ids: npt.NDArray[np.int32] | None,
    offsets: npt.NDArray[np.int64] | None,
) -> npt.NDArray[np.float32]:
    rows, columns = hidden.shape
    padded = np.zeros((rows, columns + -columns % LANES))
    padded[:, :columns] = hidden
    if ids is None or offsets is None:
        return _all_rows(padded, weight)
    return gather(padded, weight, ids, offsets)
