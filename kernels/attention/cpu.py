"""Paged attention on the CPU: one kernel for decode, verification, chunks and whole prompts.

A row's arithmetic depends on key positions alone: scores are chains over the head dimension, the
normaliser is 16 partial sums (lane = position mod 16) and a fixed tree, values are chains over the
keys of a block, added block by block. Neighbouring rows of a sequence are computed together while
a block is in cache, which changes the order of rows, never the order inside one: batch, chunking
and the places of blocks change nothing, not even the last bit. Slots beyond a row's position are
never read into a sum, so what an earlier owner left in a block (even NaN) cannot leak; but that a
word of two tokens is read as a whole, with no weight for what a row does not see of its sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from lexshard.kernels import pool
from lexshard.kernels.attention.layout import BLOCK_SIZE, words_of
from lexshard.kernels.attention.slots import put
from lexshard.kernels.attention.softmax import soften, softmax
from lexshard.kernels.attention.tiles import score_tile, value_tile
from lexshard.kernels.compile_cache import compiled_as
from lexshard.kernels.copies import copy_into
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.processor import has_feature
from lexshard.kernels.team.jobs import run

Array = npt.NDArray[Any]

# Query vectors (rows of one sequence x heads of one kv head) computed together: four tiles of 6.
TILE_QUERIES = 24
# Blocks, and panels of values, side by side in a tile of at most so many queries: of few queries
# every sum waits for the one before it, and AVX2 has registers for few sums.
WIDE, WIDE_QUERIES = (4, TILE_QUERIES) if has_feature("avx512f") else (2, 2)
# Work that takes about as long as waiting for other threads to begin and to end.
LEAST_SHARED_PRODUCTS = 200_000


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
        0,
        key.shape[1],
        words_of(key_cache),
        words_of(value_cache),
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
    """See `kernels.attention.paged_attention`. The team's threads share it."""
    queries, place = query.contiguous().numpy(), positions.numpy()
    _, heads, width = queries.shape
    large = int(place.sum()) * heads * width > LEAST_SHARED_PRODUCTS
    _attend(
        *pool.team(worth=large),
        queries,
        words_of(key_cache),
        words_of(value_cache),
        block_tables.numpy(),
        row_sequence.numpy(),
        place,
        float(scale),
        int(window),
        float(softcap),
        out.numpy(),
    )
    return out


@njit(nogil=True, cache=True)
def write_cache_rows(
    key: Array,
    value: Array,
    slots: Array,
    first_head: int,
    last_head: int,
    key_cache: Array,
    value_cache: Array,
) -> None:
    """Put the heads ``first_head`` to ``last_head - 1`` of ``key, value [T, Hkv, D]`` into their
    slots (block * 16 + offset), those of a block in ascending order."""
    for t in range(key.shape[0]):
        block, offset = slots[t] // BLOCK_SIZE, slots[t] % BLOCK_SIZE
        for head in range(first_head, last_head):
            put(key[t, head], value[t, head], key_cache, value_cache, block, head, offset)


@functools.cache
def _score_rows_of(tall: int, blocks: int) -> Callable[..., None]:
    """Products of ``count`` queries from ``query`` on with the keys of ``blocks`` blocks: into the
    columns of ``out`` from ``place`` on."""

    def score_rows(queries, query, count, keys, values, table, index, head, out, place):  # type: ignore[no-untyped-def]
        row = 0
        while count - row >= tall:
            score_tile(
                tall, blocks, queries, query, keys, values, table, index, head, out, row, place
            )
            query, row = query + tall, row + tall
        while count - row >= 2:
            score_tile(2, blocks, queries, query, keys, values, table, index, head, out, row, place)
            query, row = query + 2, row + 2
        if row < count:
            score_tile(1, blocks, queries, query, keys, values, table, index, head, out, row, place)

    return compiled_as(f"score_rows_by_{tall}_{blocks}", score_rows)


_score_narrow = _score_rows_of(6, 1)
_score_wide = _score_rows_of(min(6, WIDE_QUERIES), WIDE)


@njit(nogil=True, cache=True)
def _score_blocks(
    queries: Array,
    query: int,
    count: int,
    keys: Array,
    values: Array,
    table: Array,
    first: int,
    last: int,
    head: int,
    out: Array,
) -> None:
    """Products of ``count`` queries from ``query`` on with the keys of blocks ``first`` to ``last``
    of a table: into the first columns of ``out [>= count, ...]``."""
    blocks = last + 1 - first
    if count > WIDE_QUERIES or blocks < WIDE:
        for index in range(blocks):
            column = index * BLOCK_SIZE
            _score_narrow(
                queries, query, count, keys, values, table, first + index, head, out, column
            )
        return
    for index in range(0, blocks, WIDE):
        place = min(index, blocks - WIDE)  # some once more, which changes nothing
        column = place * BLOCK_SIZE
        _score_wide(queries, query, count, keys, values, table, first + place, head, out, column)


@functools.cache
def _value_rows_of(tall: int, panels: int) -> Callable[..., None]:
    """Of rows ``row`` to ``stop - 1``, ``panels`` panels."""

    def add_rows(weights, row, stop, column, values, block, head, first, count, panel, out):  # type: ignore[no-untyped-def]
        while stop - row >= tall:
            value_tile(
                tall, panels, weights, row, column, values, block, head, first, count, panel, out
            )
            row += tall
        while stop - row >= 2:
            value_tile(
                2, panels, weights, row, column, values, block, head, first, count, panel, out
            )
            row += 2
        if row < stop:
            value_tile(
                1, panels, weights, row, column, values, block, head, first, count, panel, out
            )

    return compiled_as(f"value_rows_by_{tall}_{panels}", add_rows)


_add_narrow = _value_rows_of(6, 1)
_add_wide = _value_rows_of(min(6, WIDE_QUERIES), WIDE)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(
    weights: Array,
    row: int,
    stop: int,
    column: int,
    values: Array,
    block: int,
    head: int,
    begin: int,
    end: int,
    out: Array,
) -> None:
    """``out[row : stop] += weights @ values`` for the keys ``begin <= k < end`` of one block, whose
    first has the weight in ``column``.

    ``weights [M, keys]`` as `operand` makes them, ``out [M, D]``. Each output is one chain
    over the keys, added to ``out``; columns beyond the last whole panel take plain loops. Words
    hold two keys: what they have beyond those has no weight.
    """
    words = BLOCK_SIZE // values.shape[2]  # keys in a word
    first, count = begin // words, (end + words - 1) // words - begin // words
    place = column // words + first
    panels, panel = out.shape[1] // PANEL, 0
    if stop - row <= WIDE_QUERIES:
        while panels - panel >= WIDE:
            _add_wide(weights, row, stop, place, values, block, head, first, count, panel, out)
            panel += WIDE
    while panel < panels:
        _add_narrow(weights, row, stop, place, values, block, head, first, count, panel, out)
        panel += 1
    for query in range(row, stop):
        for i in range(begin, end):
            for j in range(panels * PANEL, out.shape[1]):
                out[query, j] += weights[query, column + i] * values[block, head, i, j]


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


@njit(nogil=True, cache=True)
def _keys_read(positions: Array, row: int, count: int, window: int) -> tuple[int, int]:
    """The blocks, from the first to the last, that a run of ``count`` rows attends."""
    stop = positions[row] + 1
    start = stop - window if window > 0 else 0
    return max(0, start) // BLOCK_SIZE, (stop + count - 2) // BLOCK_SIZE


@njit(nogil=True, cache=True)
def _blocks_read(row_sequence: Array, positions: Array, window: int, most_rows: int) -> int:
    """How many blocks all runs of rows attend, each as often as the run has rows."""
    total, row = 0, 0
    while row < positions.shape[0]:
        count = _run_length(row_sequence, positions, row, most_rows)
        first_block, last_block = _keys_read(positions, row, count, window)
        total += count * (last_block + 1 - first_block)
        row += count
    return total


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
    first_head: int,
    last_head: int,
    rank: int,
    size: int,
    out: Array,
) -> None:
    """``paged_attention`` on numpy arrays, float32 but for caches, result in ``out [T, H, D]``: of
    the kv heads ``first_head`` to ``last_head - 1`` what one of ``size`` threads does, which share
    runs of rows, and heads of a run."""
    rows, heads, width = query.shape
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    most_rows = max(1, TILE_QUERIES // group)
    most = most_rows * group
    asked = operand(query.reshape(rows * heads, width), key_cache[0], key_cache.shape[2])
    together = np.empty((most, asked.shape[1]), asked.dtype)
    sums = np.empty((most, width), dtype=np.float32)
    totals = np.empty(most, dtype=np.float32)
    lanes = np.empty(BLOCK_SIZE, dtype=np.float32)
    factor, cap = np.float32(scale), np.float32(softcap)
    every = (last_head - first_head) * _blocks_read(row_sequence, positions, window, most_rows)
    read, row = 0, 0
    while row < rows:
        count = _run_length(row_sequence, positions, row, most_rows)
        members = count * group
        table = block_tables[row_sequence[row]]
        # Row r of the run attends start + r <= p < stop + r, floored at position 0.
        stop = positions[row] + 1
        start = stop - window if window > 0 else -rows - 1 - stop
        first_block, last_block = _keys_read(positions, row, count, window)
        padded = (last_block + 1 - first_block) * BLOCK_SIZE
        scores = np.empty((members, padded), dtype=np.float32)
        for kv_head in range(first_head, last_head):
            owner = read * size // every
            read += count * (last_block + 1 - first_block)
            if owner != rank:
                continue
            head = kv_head * group
            if count == 1:
                _score_blocks(
                    asked, row * heads + head, members, key_cache, value_cache, table,
                    first_block, last_block, kv_head, scores,
                )  # fmt: skip
            else:
                for r in range(count):
                    for h in range(group):
                        copy_into(together[r * group + h], asked[(row + r) * heads + head + h])
                _score_blocks(
                    together, 0, members, key_cache, value_cache, table,
                    first_block, last_block, kv_head, scores,
                )  # fmt: skip
            for member in range(members):
                r = member // group
                begin, end = max(0, start + r), stop + r
                place = (begin // BLOCK_SIZE - first_block) * BLOCK_SIZE
                own = scores[member, place:]
                for i in range(end - begin + begin % BLOCK_SIZE):
                    own[i] *= factor
                if cap > 0:
                    soften(own, end - begin + begin % BLOCK_SIZE, cap)
                totals[member] = softmax(own, begin, end, lanes)
            weights = operand(scores, value_cache, padded // 2)
            sums[:members] = 0.0
            for index in range(first_block, last_block + 1):
                base = index * BLOCK_SIZE
                place = base - first_block * BLOCK_SIZE
                block = np.int64(table[index])
                low = max(0, base + 1 - stop)  # the rows that see any key of this block
                high = min(count, base + BLOCK_SIZE - start)
                whole_low = min(high, max(low, base + BLOCK_SIZE - stop))
                whole_high = max(whole_low, min(high, base - start + 1))
                if whole_high > whole_low:  # rows that see all 16 keys go together
                    _add_values(
                        weights, whole_low * group, whole_high * group, place, value_cache,
                        block, kv_head, 0, BLOCK_SIZE, sums,
                    )  # fmt: skip
                for r in range(low, high):
                    if whole_low <= r < whole_high:
                        continue
                    begin = max(0, start + r - base)
                    end = min(BLOCK_SIZE, stop + r - base)
                    _add_values(
                        weights, r * group, (r + 1) * group, place, value_cache,
                        block, kv_head, begin, end, sums,
                    )  # fmt: skip
            for r in range(count):
                for h in range(group):
                    total = totals[r * group + h]
                    for j in range(width):
                        out[row + r, head + h, j] = sums[r * group + h, j] / total
        row += count


@njit(nogil=True, cache=True)
def _attend_part(
    rank: int,
    size: int,
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
    attention_rows(
        query, key_cache, value_cache, block_tables, row_sequence, positions,
        scale, window, softcap, 0, key_cache.shape[1], rank, size, out,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _attend(
    team: Array,
    size: int,
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
    run(
        team,
        size,
        _attend_part,
        (
            query, key_cache, value_cache, block_tables, row_sequence, positions,
            scale, window, softcap, out,
        ),
    )  # fmt: skip
