"""The softmax of a row of attention scores, in place and in an order of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.exponential.single_precision import exponential

Array = npt.NDArray[Any]


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _tanh(x: np.float32) -> np.float32:
    """``tanh(x)`` in float32 as plain arithmetic (2 units in the last place), vectorisable.

    A minimax polynomial below 0.625 (Cephes' ``tanhf``), ``1 - 2 / (exp(2 |x|) + 1)`` above.
    """
    size = abs(x)
    square = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * square + np.float32(2.06390887954e-2)
    p = p * square + np.float32(-5.37397155531e-2)
    p = p * square + np.float32(1.33314422036e-1)
    p = p * square + np.float32(-3.33332819422e-1)
    near = p * square * x + x
    far = np.float32(1.0) - np.float32(2.0) / (
        exponential(min(size + size, np.float32(40.0))) + np.float32(1.0)
    )
    far = far if x > np.float32(0.0) else -far
    return near if size < np.float32(0.625) else far


@njit(nogil=True, cache=True, error_model="numpy")
def soften(scores: Array, count: int, cap: np.float32) -> None:
    """``cap * tanh(score / cap)`` in place for the first ``count`` scores."""
    for i in range(count):
        scores[i] = cap * _tanh(scores[i] / cap)


@njit(nogil=True, cache=True, error_model="numpy")
def softmax(scores: Array, start: int, stop: int, lanes: Array) -> np.float32:
    """Exponentials in place for positions ``start <= p < stop``; returns their sum.

    ``scores`` begins at position ``start - start % 16`` and is padded to whole blocks; positions
    outside the range become 0. ``lanes [16]`` is room for partial results.
    """
    first = start - start % BLOCK_SIZE
    low, high = start - first, stop - first
    padded = -(-high // BLOCK_SIZE) * BLOCK_SIZE
    scores[:low] = -np.inf
    scores[high:padded] = -np.inf
    lanes[:] = -np.inf
    for block in range(0, padded, BLOCK_SIZE):
        for i in range(BLOCK_SIZE):
            lanes[i] = lanes[i] if lanes[i] > scores[block + i] else scores[block + i]
    largest = lanes[0]
    for i in range(1, BLOCK_SIZE):
        largest = max(largest, lanes[i])
    for i in range(padded):
        scores[i] = exponential(scores[i] - largest)
    lanes[:] = 0.0
    for block in range(0, padded, BLOCK_SIZE):
        for i in range(BLOCK_SIZE):
            lanes[i] += scores[block + i]
    width = BLOCK_SIZE // 2
    while width > 0:
        for i in range(width):
            lanes[i] += lanes[i + width]
        width //= 2
    return lanes[0]


@njit(nogil=True, cache=True, error_model="numpy")
def weigh(
    scores: Array,
    members: int,
    group: int,
    first_block: int,
    start: int,
    stop: int,
    factor: np.float32,
    cap: np.float32,
    totals: Array,
    lanes: Array,
) -> None:
    """Products with keys to what values are weighted with, in place: ``scores [heads * members, 16
    blocks]`` from block ``first_block`` on, ``group`` queries of each row of a run, of which row r
    attends ``start + r <= p < stop + r``; 0 elsewhere. Each sum of weights goes to ``totals``."""
    for query in range(scores.shape[0]):
        r = query % members // group
        begin, end = max(0, start + r), stop + r
        place = (begin // BLOCK_SIZE - first_block) * BLOCK_SIZE
        every = scores[query]
        own, seen = every[place:], end - begin + begin % BLOCK_SIZE
        for i in range(seen):
            own[i] *= factor
        if cap > 0:
            soften(own, seen, cap)
        totals[query] = softmax(own, begin, end, lanes)
        for i in range(place):
            every[i] = 0.0
        for i in range(seen, own.shape[0]):
            own[i] = 0.0
