"""The screens in numba: tiles of weight rows x hidden rows, integers until the last step.

A panel of 16 weight rows stays in the cache while all hidden rows pass over it, four at a time.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels import pool
from kernels.quantize.tiers import DitheredInt4Tier, Int4Tier, Int8Tier, Tier
from kernels.screen.hidden import QuantizedHidden
from kernels.screen.tile import PANEL, dot_bytes, dot_nibbles

# Below this many products a second thread costs more than it saves.
MULTIPLICATIONS_PER_THREAD = 2_000_000


@njit(nogil=True, cache=True)
def _scale_panel(sums, scale, products, step, share, out, first, last):  # type: ignore[no-untyped-def]
    """Sums of the rows ``first`` to ``last - 1`` to estimates."""
    for query in range(out.shape[0]):
        for row in range(first, last):
            value = np.float64(sums[query, row - first]) * (np.float64(scale[row]) * step[query])
            if products.size:
                value += share[query] * np.float64(products[row])
            out[query, row] = np.float32(value)


@njit(nogil=True, cache=True)
def _screen_bytes(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, step, share, out, first, last
):
    count = hidden.shape[0]
    sums = np.empty((count, PANEL), np.int32)
    for start in range(first, last, PANEL):
        stop = min(start + PANEL, last)
        query = 0
        while query + 3 < count:
            for row in range(start, stop):
                dot_bytes(4, values, row, hidden, query, sums, row - start)
            query += 4
        while query < count:
            for row in range(start, stop):
                dot_bytes(1, values, row, hidden, query, sums, row - start)
            query += 1
        _scale_panel(sums, scale, products, step, share, out, start, stop)


@njit(nogil=True, cache=True)
def _screen_nibbles(  # type: ignore[no-untyped-def]
    nibbles, multipliers, scale, products, hidden, starts, step, share, out, first, last
):
    count = hidden.shape[0]
    sums = np.empty((count, PANEL), np.int32)
    for start in range(first, last, PANEL):
        stop = min(start + PANEL, last)
        query = 0
        while query + 3 < count:
            for row in range(start, stop):
                place = row - start
                dot_nibbles(4, nibbles, multipliers, row, hidden, starts, query, sums, place)
            query += 4
        while query < count:
            for row in range(start, stop):
                place = row - start
                dot_nibbles(1, nibbles, multipliers, row, hidden, starts, query, sums, place)
            query += 1
        _scale_panel(sums, scale, products, step, share, out, start, stop)


@njit(nogil=True, cache=True)
def _refine(  # type: ignore[no-untyped-def]
    high, low, multipliers, scale, products, hidden, starts, step, share, ids, offsets
):
    result = np.empty(ids.size, np.float32)
    sums = np.empty((hidden.shape[0], 2), np.int32)
    for query in range(hidden.shape[0]):
        for index in range(offsets[query], offsets[query + 1]):
            row = ids[index]
            dot_nibbles(1, high, multipliers, row, hidden, starts, query, sums, 0)
            dot_nibbles(1, low, multipliers, row, hidden, starts, query, sums, 1)
            total = np.int64(16) * np.int64(sums[query, 0]) + np.int64(sums[query, 1])
            value = np.float64(total) * (np.float64(scale[row]) * step[query])
            if products.size:
                value += share[query] * np.float64(products[row])
            result[index] = np.float32(value)
    return result


def _products(tier: Tier) -> npt.NDArray[np.float32]:
    return np.empty(0, np.float32) if tier.common is None else tier.common.products


def screen(hidden: QuantizedHidden, tier: Tier) -> npt.NDArray[np.float32]:
    """Estimates [N, V] of integer hidden states."""
    count, rows = len(hidden.step), len(tier.scale)
    out = np.empty((count, rows), np.float32)
    values, step, share = hidden.values.numpy(), hidden.step.numpy(), hidden.share.numpy()
    if isinstance(tier, Int8Tier):
        work = partial(
            _screen_bytes, tier.values, tier.scale, _products(tier), values, step, share, out
        )
    else:
        dithered = isinstance(tier, DitheredInt4Tier)
        work = partial(
            _screen_nibbles,
            tier.nibbles if isinstance(tier, DitheredInt4Tier) else tier.high,
            tier.multipliers,
            tier.scale,
            _products(tier),
            values,
            hidden.starts.numpy(),
            step if dithered else 16.0 * step,
            share,
            out,
        )
    parts = pool.threads() if values.size * rows > MULTIPLICATIONS_PER_THREAD else 1
    cuts = [rows * part // parts for part in range(parts + 1)]
    pool.run([partial(work, first, last) for first, last in pairwise(cuts)])
    return out


def refine(
    hidden: QuantizedHidden,
    tier: Int4Tier,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    """Estimates of both planes for the rows ``ids[offsets[n]:offsets[n + 1]]`` of every ``n``."""
    return _refine(
        tier.high,
        tier.low,
        tier.multipliers,
        tier.scale,
        _products(tier),
        hidden.values.numpy(),
        hidden.starts.numpy(),
        hidden.step.numpy(),
        hidden.share.numpy(),
        ids,
        offsets,
    )
