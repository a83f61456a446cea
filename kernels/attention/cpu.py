"""Paged attention on the CPU: one kernel for decode, verification, chunks and whole prompts.

A row's arithmetic depends on key positions alone: scores are chains over the head dimension, the
normaliser is 16 partial sums (lane = position mod 16) and a fixed tree, values are chains over the
keys of a block, added block by block. Neighbouring rows of a sequence are computed together while
a block is in cache, which changes the order of rows, never the order inside one: batch, chunking
and the places of blocks change nothing, not even the last bit. Slots beyond a row's position are
never read into a sum, so what an earlier owner left in a block (even NaN) cannot leak.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from lexshard.kernels import pool
from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.exponential.single_precision import exponential
from lexshard.kernels.linear.tile import PANEL, tile

Array = npt.NDArray[Any]

# Query vectors (rows of one sequence x heads of one kv head) computed together: four tiles of 6.
TILE_QUERIES = 24
# Work that takes about as long as handing some of it to another thread (50 microseconds).
LEAST_SHARED_PRODUCTS = 1_000_000


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """See `kernels.attention.write_cache`."""
    write_cache_rows(
        key.contiguous().numpy(),
        value.contiguous().numpy(),
        slots.numpy(),
        key_cache.numpy(),
        value_cache.numpy(),
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.attention.paged_attention`. Rows are shared out among the pool's threads."""
    queries, place = query.contiguous().numpy(), positions.numpy()
    owners, result = row_sequence.numpy(), out.numpy()
    rows, heads, width = queries.shape
    shares = [(0, rows)]
    if pool.threads() > 1 and int(place.sum()) * heads * width > LEAST_SHARED_PRODUCTS:
        shares = pool.even_shares((place + 1).tolist(), pool.threads())
    pool.run(
        [
            partial(
                attention_rows,
                queries[first:last],
                key_cache.numpy(),
                value_cache.numpy(),
                block_tables.numpy(),
                owners[first:last],
                place[first:last],
                float(scale),
                int(window),
                float(softcap),
                result[first:last],
            )
            for first, last in shares
        ]
    )
    return out


@njit(nogil=True, cache=True)
def write_cache_rows(
    key: Array, value: Array, slots: Array, key_cache: Array, value_cache: Array
) -> None:
    """Put ``key, value [T, Hkv, D]`` into their slots (block * 16 + offset)."""
    for t in range(key.shape[0]):
        block, offset = slots[t] // BLOCK_SIZE, slots[t] % BLOCK_SIZE
        for head in range(key.shape[1]):
            for j in range(key.shape[2]):
                key_cache[block, head, j, offset] = key[t, head, j]
            for j in range(key.shape[2]):
                value_cache[block, head, offset, j] = value[t, head, j]


@njit(nogil=True, cache=True, inline="never")
def _block_products(
    queries: Array, first: int, count: int, keys: Array, head: int, out: Array
) -> None:
    """Dot products of ``queries[first : first + count]`` with the 16 keys of one block.

    ``queries [M, D]``, ``keys [Hkv, D, 16]``; the results of a query lie in its row of ``out``,
    columns ``head * 16 ... head * 16 + 15``.
    """
    stop = first + count
    while stop - first >= 6:
        tile(6, 1, 0, queries, first, keys, head, out)
        first += 6
    if stop - first >= 4:
        tile(4, 1, 0, queries, first, keys, head, out)
        first += 4
    if stop - first >= 2:
        tile(2, 1, 0, queries, first, keys, head, out)
        first += 2
    if stop - first == 1:
        tile(1, 1, 0, queries, first, keys, head, out)


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
def _soften(scores: Array, count: int, cap: np.float32) -> None:
    """``cap * tanh(score / cap)`` in place for the first ``count`` scores."""
    for i in range(count):
        scores[i] = cap * _tanh(scores[i] / cap)


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax(scores: Array, start: int, stop: int) -> np.float32:
    """Exponentials in place for positions ``start <= p < stop``; returns their sum.

    ``scores`` begins at position ``start - start % 16`` and is padded to whole blocks; positions
    outside the range become 0.
    """
    first = start - start % BLOCK_SIZE
    low, high = start - first, stop - first
    padded = -(-high // BLOCK_SIZE) * BLOCK_SIZE
    scores[:low] = -np.inf
    scores[high:padded] = -np.inf
    lanes = np.full(BLOCK_SIZE, -np.inf, dtype=np.float32)
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


@njit(nogil=True, cache=True, inline="never")
def _add_panels(weights: Array, first: int, count: int, values: Array, out: Array) -> None:
    """Whole panels of 16 columns: ``out[first ...] += weights[first ...] @ values``."""
    panels = out.shape[1] // PANEL
    panel = 0
    if count == 1:
        while panels - panel >= 4:
            tile(1, 4, 1, weights, first, values, panel, out)
            panel += 4
        while panel < panels:
            tile(1, 1, 1, weights, first, values, panel, out)
            panel += 1
    elif count == 2:
        while panels - panel >= 2:
            tile(2, 2, 1, weights, first, values, panel, out)
            panel += 2
        if panel < panels:
            tile(2, 1, 1, weights, first, values, panel, out)
    elif count == 4:
        while panel < panels:
            tile(4, 1, 1, weights, first, values, panel, out)
            panel += 1
    else:
        while panel < panels:
            tile(6, 1, 1, weights, first, values, panel, out)
            panel += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(weights: Array, first: int, count: int, values: Array, out: Array) -> None:
    """``out += weights @ values`` for ``count`` queries from ``first`` and the keys of one block.

    ``weights [M, keys]``, ``values [keys, D]``, ``out [M, D]``. Each output is one chain over the
    keys, added to ``out``; columns beyond the last whole panel take plain loops.
    """
    done, stop = first, first + count
    while stop - done >= 6:
        _add_panels(weights, done, 6, values, out)
        done += 6
    if stop - done >= 4:
        _add_panels(weights, done, 4, values, out)
        done += 4
    if stop - done >= 2:
        _add_panels(weights, done, 2, values, out)
        done += 2
    if stop - done == 1:
        _add_panels(weights, done, 1, values, out)
    width = out.shape[1]
    whole = width - width % PANEL
    if whole < width:
        for query in range(first, stop):
            for i in range(values.shape[0]):
                for j in range(whole, width):
                    out[query, j] += weights[query, i] * values[i, j]


@njit(nogil=True, cache=True)
def _run_length(row_sequence: Array, positions: Array, row: int, most: int) -> int:
    """How many rows from ``row`` on are consecutive tokens of one sequence, at most ``most``."""
    count = 1
    while (
        count < most
        and row + count < positions.shape[0]
        and row_sequence[row + count] == row_sequence[row]
        and positions[row + count] == positions[row] + count
    ):
        count += 1
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def attention_rows(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    row_sequence: Array,
    positions: Array,
    scale: float,
    window: int,
    softcap: float,
    out: Array,
) -> None:
    """``paged_attention`` on numpy arrays, float32, result in ``out [T, H, D]``."""
    rows, heads, width = query.shape
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    most_rows = max(1, TILE_QUERIES // group)
    queries = np.empty((most_rows * group, width), dtype=np.float32)
    sums = np.empty((most_rows * group, width), dtype=np.float32)
    products = np.empty((most_rows * group, kv_heads * BLOCK_SIZE), dtype=np.float32)
    scores = np.empty((most_rows * group, block_tables.shape[1] * BLOCK_SIZE), dtype=np.float32)
    totals = np.empty(most_rows * group, dtype=np.float32)
    factor, cap = np.float32(scale), np.float32(softcap)
    row = 0
    while row < rows:
        count = _run_length(row_sequence, positions, row, most_rows)
        table = block_tables[row_sequence[row]]
        # Row r of the run attends start + r <= p < stop + r, floored at position 0.
        stop = positions[row] + 1
        start = stop - window if window > 0 else -rows - 1 - stop
        first_block = max(0, start) // BLOCK_SIZE
        last_block = (stop + count - 2) // BLOCK_SIZE
        for kv_head in range(kv_heads):
            head = kv_head * group
            for r in range(count):
                for h in range(group):
                    for j in range(width):
                        queries[r * group + h, j] = query[row + r, head + h, j]
            for index in range(first_block, last_block + 1):
                base = index * BLOCK_SIZE
                low = max(0, base + 1 - stop)  # the rows that see any key of this block
                high = min(count, base + BLOCK_SIZE - start)
                _block_products(
                    queries,
                    low * group,
                    (high - low) * group,
                    key_cache[table[index]],
                    kv_head,
                    products,
                )
                place, column = base - first_block * BLOCK_SIZE, kv_head * BLOCK_SIZE
                for member in range(low * group, high * group):
                    for i in range(BLOCK_SIZE):
                        scores[member, place + i] = products[member, column + i] * factor
            for member in range(count * group):
                r = member // group
                begin, end = max(0, start + r), stop + r
                place = (begin // BLOCK_SIZE - first_block) * BLOCK_SIZE
                own = scores[member, place:]
                if cap > 0:
                    _soften(own, end - begin + begin % BLOCK_SIZE, cap)
                totals[member] = _softmax(own, begin, end)
            sums[:] = 0.0
            for index in range(first_block, last_block + 1):
                base = index * BLOCK_SIZE
                place = base - first_block * BLOCK_SIZE
                values = value_cache[table[index], kv_head]
                low = max(0, base + 1 - stop)
                high = min(count, base + BLOCK_SIZE - start)
                whole_low = min(high, max(low, base + BLOCK_SIZE - stop))
                whole_high = max(whole_low, min(high, base - start + 1))
                if whole_high > whole_low:  # rows that see all 16 keys go together
                    _add_values(
                        scores[:, place : place + BLOCK_SIZE],
                        whole_low * group,
                        (whole_high - whole_low) * group,
                        values,
                        sums,
                    )
                for r in range(low, high):
                    if whole_low <= r < whole_high:
                        continue
                    begin = max(0, start + r - base)
                    end = min(BLOCK_SIZE, stop + r - base)
                    _add_values(
                        scores[:, place + begin : place + end],
                        r * group,
                        group,
                        values[begin:end],
                        sums,
                    )
            for r in range(count):
                for h in range(group):
                    total = totals[r * group + h]
                    for j in range(width):
                        out[row + r, head + h, j] = sums[r * group + h, j] / total
        row += count
