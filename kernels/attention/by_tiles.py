"""Attention by register tiles of queries and keys, or of queries and values, at any precision.

Neighbouring rows of a sequence are computed together while a block is in cache, which changes the
order of rows, never the order inside one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.attention.softmax import weigh
from lexshard.kernels.attention.tiles import FEW_ROWS, score_tile, value_tile
from lexshard.kernels.compile_cache import compiled_as
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.processor import has_feature

Array = npt.NDArray[Any]

# Query vectors (rows of one sequence x heads of one kv head) computed together: four tiles of 6.
TILE_QUERIES = 24
# Blocks, and panels of values, side by side in a tile of at most so many queries: of few queries
# every sum waits for the one before it, and AVX2 has registers for few sums.
WIDE, WIDE_QUERIES = (4, TILE_QUERIES) if has_feature("avx512f") else (2, 2)
# Panels of so few queries that more fit side by side: a block is read from its beginning to its
# end, as memory gives it fastest.
LONG, LONG_QUERIES = (8, 2 * FEW_ROWS) if FEW_ROWS else (WIDE, WIDE_QUERIES)


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

    def add_rows(weights, row, stop, column, values, blocks, head, first, count, panel, out):  # type: ignore[no-untyped-def]
        while stop - row >= tall:
            value_tile(
                tall, panels, weights, row, column, values, blocks, head, first, count, panel, out
            )
            row += tall
        while stop - row >= 2:
            value_tile(
                2, panels, weights, row, column, values, blocks, head, first, count, panel, out
            )
            row += 2
        if row < stop:
            value_tile(
                1, panels, weights, row, column, values, blocks, head, first, count, panel, out
            )

    return compiled_as(f"value_rows_by_{tall}_{panels}", add_rows)


_add_narrow = _value_rows_of(6, 1)
_add_long = _value_rows_of(FEW_ROWS or 2, LONG)
_add_wide = _value_rows_of(min(6, WIDE_QUERIES), WIDE)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(
    weights: Array,
    row: int,
    stop: int,
    column: int,
    values: Array,
    blocks: tuple[int, int],
    head: int,
    begin: int,
    end: int,
    out: Array,
) -> None:
    """``out[row : stop] += weights @ values`` for the keys ``begin <= k < end`` of the first of two
    ``blocks``, whose first has the weight in ``column``; the second is read next.

    ``weights [M, keys]`` as `operand` makes them, ``out [M, D]``. Each output is one chain
    over the keys, added to ``out``; columns beyond the last whole panel take plain loops. Words
    hold two keys: what they have beyond those has no weight.
    """
    words = BLOCK_SIZE // values.shape[2]  # keys in a word
    first, count = begin // words, (end + words - 1) // words - begin // words
    place = column // words + first
    panels, panel = out.shape[1] // PANEL, 0
    if stop - row <= LONG_QUERIES:
        while panels - panel >= LONG:
            _add_long(weights, row, stop, place, values, blocks, head, first, count, panel, out)
            panel += LONG
    if stop - row <= WIDE_QUERIES:
        while panels - panel >= WIDE:
            _add_wide(weights, row, stop, place, values, blocks, head, first, count, panel, out)
            panel += WIDE
    while panel < panels:
        _add_narrow(weights, row, stop, place, values, blocks, head, first, count, panel, out)
        panel += 1
    for query in range(row, stop):
        for i in range(begin, end):
            for j in range(panels * PANEL, out.shape[1]):
                out[query, j] += weights[query, column + i] * values[blocks[0], head, i, j]


@njit(nogil=True, cache=True, error_model="numpy")
def attend_by_tiles(
    queries: Array,
    query: int,
    members: int,
    group: int,
    keys: Array,
    values: Array,
    table: Array,
    first_block: int,
    last_block: int,
    low: int,
    high: int,
    start: int,
    stop: int,
    factor: np.float32,
    cap: np.float32,
    scores: Array,
    totals: Array,
    lanes: Array,
    sums: Array,
) -> None:
    """What the heads ``low`` to ``high - 1`` say to ``members`` queries each, from ``query`` on,
    ``group`` of each row of a run: ``sums [members (high - low), D]``, to be divided by ``totals``.

    Row r of the run attends ``start + r <= p < stop + r``. ``scores [members (high - low), 16
    blocks]`` is room to work in.
    """
    count = members // group
    for head in range(low, high):
        first = members * (head - low)
        own_scores, own_sums = scores[first : first + members], sums[first : first + members]
        _score_blocks(
            queries, query + first, members, keys, values, table, first_block, last_block, head,
            own_scores,
        )  # fmt: skip
        own_totals = totals[first : first + members]
        weigh(own_scores, members, group, first_block, start, stop, factor, cap, own_totals, lanes)
        weights = operand(own_scores, values, scores.shape[1] // 2)
        own_sums[:] = 0.0
        for index in range(first_block, last_block + 1):
            base = index * BLOCK_SIZE
            place = base - first_block * BLOCK_SIZE
            blocks = np.int64(table[index]), np.int64(table[min(index + 1, last_block)])
            early = max(0, base + 1 - stop)  # the rows that see any key of this block
            late = min(count, base + BLOCK_SIZE - start)
            whole_early = min(late, max(early, base + BLOCK_SIZE - stop))
            whole_late = max(whole_early, min(late, base - start + 1))
            if whole_late > whole_early:  # rows that see all 16 keys go together
                _add_values(
                    weights, whole_early * group, whole_late * group, place, values,
                    blocks, head, 0, BLOCK_SIZE, own_sums,
                )  # fmt: skip
            for r in range(early, late):
                if whole_early <= r < whole_late:
                    continue
                begin = max(0, start + r - base)
                end = min(BLOCK_SIZE, stop + r - base)
                _add_values(
                    weights, r * group, (r + 1) * group, place, values,
                    blocks, head, begin, end, own_sums,
                )  # fmt: skip
