"""Paged attention on the CPU: one row kernel for decode, verification, chunks and whole prompts.

A row's arithmetic depends on key positions alone: scores are chains over the head dimension, the
normaliser is 16 partial sums (lane = position mod 16) and a fixed tree, values are chains over the
keys of a block, added block by block. Batch, chunking and the places of blocks change nothing, not even the last
bit. Slots beyond a row's position are never read into a sum, so what an earlier owner left in a
block (even NaN) cannot leak.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.elementwise.cpu import exponential
from kernels.linear.tile import PANEL, tile

Array = npt.NDArray[Any]

BLOCK = 16


@njit(nogil=True, cache=True)
def write_cache_rows(
    key: Array, value: Array, slots: Array, key_cache: Array, value_cache: Array
) -> None:
    """Put ``key, value [T, Hkv, D]`` into their slots (block * 16 + offset)."""
    for t in range(key.shape[0]):
        block, offset = slots[t] // BLOCK, slots[t] % BLOCK
        for head in range(key.shape[1]):
            for j in range(key.shape[2]):
                key_cache[block, head, j, offset] = key[t, head, j]
            for j in range(key.shape[2]):
                value_cache[block, head, offset, j] = value[t, head, j]


@njit(nogil=True, cache=True, inline="never")
def _block_scores(query: Array, first: int, count: int, keys: Array, head: int, out: Array) -> None:
    """Dot products of query heads ``first ...`` with the 16 keys of one block.

    ``query [H, D]``, ``keys [Hkv, D, 16]``; the result for head ``h`` lies in
    ``out[h, head * 16 : head * 16 + 16]``.
    """
    done = 0
    while count - done >= 4:
        tile(4, 1, 0, query, first + done, keys, head, out)
        done += 4
    if count - done >= 2:
        tile(2, 1, 0, query, first + done, keys, head, out)
        done += 2
    if count - done == 1:
        tile(1, 1, 0, query, first + done, keys, head, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _softmax(scores: Array, start: int, stop: int) -> np.float32:
    """Exponentials in place for positions ``start <= p < stop``; returns their sum.

    ``scores`` begins at position ``start - start % 16`` and is padded to whole blocks; positions
    outside the range become 0.
    """
    first = start - start % BLOCK
    low, high = start - first, stop - first
    padded = -(-high // BLOCK) * BLOCK
    scores[:low] = -np.inf
    scores[high:padded] = -np.inf
    lanes = np.full(BLOCK, -np.inf, dtype=np.float32)
    for block in range(0, padded, BLOCK):
        for i in range(BLOCK):
            lanes[i] = lanes[i] if lanes[i] > scores[block + i] else scores[block + i]
    largest = lanes[0]
    for i in range(1, BLOCK):
        largest = max(largest, lanes[i])
    for i in range(padded):
        scores[i] = exponential(scores[i] - largest)
    lanes[:] = 0.0
    for block in range(0, padded, BLOCK):
        for i in range(BLOCK):
            lanes[i] += scores[block + i]
    width = BLOCK // 2
    while width > 0:
        for i in range(width):
            lanes[i] += lanes[i + width]
        width //= 2
    return lanes[0]


@njit(nogil=True, cache=True, inline="never")
def _add_panels(weights: Array, row: int, count: int, values: Array, out: Array) -> None:
    """Whole panels of 16 columns: ``out[row ...] += weights[row ...] @ values`` for some heads."""
    panels = out.shape[1] // PANEL
    panel = 0
    if count == 1:
        while panels - panel >= 4:
            tile(1, 4, 1, weights, row, values, panel, out)
            panel += 4
        while panel < panels:
            tile(1, 1, 1, weights, row, values, panel, out)
            panel += 1
    elif count == 2:
        while panels - panel >= 2:
            tile(2, 2, 1, weights, row, values, panel, out)
            panel += 2
        if panel < panels:
            tile(2, 1, 1, weights, row, values, panel, out)
    else:
        while panel < panels:
            tile(4, 1, 1, weights, row, values, panel, out)
            panel += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(weights: Array, values: Array, out: Array) -> None:
    """``out += weights @ values`` for the query heads of one kv head and the keys of one block.

    ``weights [heads, keys]``, ``values [keys, D]``, ``out [heads, D]``. Each output is one chain
    over the keys, added to ``out``; columns beyond the last whole panel take plain loops.
    """
    heads, width = out.shape
    done = 0
    while heads - done >= 4:
        _add_panels(weights, done, 4, values, out)
        done += 4
    if heads - done >= 2:
        _add_panels(weights, done, 2, values, out)
        done += 2
    if heads - done == 1:
        _add_panels(weights, done, 1, values, out)
    first = width - width % PANEL
    if first < width:
        for head in range(heads):
            for i in range(values.shape[0]):
                for j in range(first, width):
                    out[head, j] += weights[head, i] * values[i, j]


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
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    group = heads // kv_heads
    block_scores = np.empty((heads, kv_heads * BLOCK), dtype=np.float32)
    scores = np.empty((group, block_tables.shape[1] * BLOCK), dtype=np.float32)
    totals = np.empty(group, dtype=np.float32)
    factor, cap = np.float32(scale), np.float32(softcap)
    for t in range(query.shape[0]):
        table = block_tables[row_sequence[t]]
        stop = positions[t] + 1
        start = max(0, stop - window) if window > 0 else 0
        first_block, last_block = start // BLOCK, (stop - 1) // BLOCK
        for kv_head in range(kv_heads):
            first_head = kv_head * group
            for index in range(first_block, last_block + 1):
                _block_scores(
                    query[t], first_head, group, key_cache[table[index]], kv_head, block_scores
                )
                place = (index - first_block) * BLOCK
                for member in range(group):
                    for i in range(BLOCK):
                        scores[member, place + i] = (
                            block_scores[first_head + member, kv_head * BLOCK + i] * factor
                        )
            if cap > 0:
                for member in range(group):
                    for i in range((last_block - first_block + 1) * BLOCK):
                        scores[member, i] = cap * np.tanh(scores[member, i] / cap)
            rows = out[t, first_head : first_head + group]
            rows[:] = 0.0
            for member in range(group):
                totals[member] = _softmax(scores[member], start, stop)
            for index in range(first_block, last_block + 1):
                base = index * BLOCK
                low, high = max(start - base, 0), min(stop - base, BLOCK)
                place = base - first_block * BLOCK
                _add_values(
                    scores[:, place + low : place + high],
                    value_cache[table[index], kv_head, low:high],
                    rows,
                )
            for member in range(group):
                for j in range(rows.shape[1]):
                    rows[member, j] = rows[member, j] / totals[member]
