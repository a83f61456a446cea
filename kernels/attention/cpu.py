"""Paged attention on the CPU: one kernel for decode, verification, chunks and whole prompts.

A row's arithmetic depends on key positions alone: scores are chains over the head dimension, the
normaliser is 16 partial sums (lane = position mod 16) and a fixed tree, values are chains over the
keys of a block, added block by block (`kernels.attention.by_tiles`; by matrices each chain is two,
`kernels.attention.matrix`). Neighbouring rows of a sequence are computed together, which changes
the order of rows, never the order inside one: batch, chunking and the places of blocks change
nothing, not even the last bit. Slots beyond a run of rows are never read into a sum, so what an
earlier owner left in a block (even NaN) cannot leak; but a word of two tokens, and by matrices a
block, is read as a whole, with no weight for what a row does not see of its sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from numba.extending import overload

from lexshard.kernels import pool
from lexshard.kernels.attention.by_tiles import TILE_QUERIES, attend_by_tiles
from lexshard.kernels.attention.layout import BLOCK_SIZE, words_of
from lexshard.kernels.attention.matrix import attend_by_matrices
from lexshard.kernels.attention.slots import put
from lexshard.kernels.copies import copy_into
from lexshard.kernels.linear.matrix import MOST_ROWS, PAIRS
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.processor import multiplies_matrices, sums_as_matrices
from lexshard.kernels.team.jobs import run

Array = npt.NDArray[Any]

# Query vectors computed together, unless one token has more.
MOST_QUERIES = MOST_ROWS if multiplies_matrices() else TILE_QUERIES
# Heads are computed together as long as they have no more scores: what is in the cache stays there.
MOST_SCORES = 1 << 15
# Work that takes about as long as waiting for other threads to begin and to end.
LEAST_SHARED_PRODUCTS = 200_000
_ZERO = np.int64(0)
_KEYS = 4  # which argument of `attend_by_tiles` they are


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


def _attend_heads(*arguments: Any) -> None:
    """`attend_by_tiles`, or by matrices where there are any and sums are in that order."""
    raise NotImplementedError("only compiled functions call this")


@overload(_attend_heads)
def _attend_heads_by(*arguments: Any) -> Any:
    def by_tiles(*arguments: Any) -> None:
        attend_by_tiles(*arguments)

    def by_matrices(*arguments: Any) -> None:
        if arguments[_KEYS].shape[2] % PAIRS == 0:
            attend_by_matrices(*arguments)
        else:
            attend_by_tiles(*arguments)

    words = arguments[_KEYS].dtype == types.uint32
    return by_matrices if words and sums_as_matrices() else by_tiles


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
    most_rows = max(1, MOST_QUERIES // group)
    most = most_rows * group
    asked = operand(query.reshape(rows * heads, width), key_cache[0], key_cache.shape[2])
    together = np.empty((kv_heads * most, asked.shape[1]), asked.dtype)
    sums = np.empty((kv_heads * most, width), dtype=np.float32)
    totals = np.empty(kv_heads * most, dtype=np.float32)
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
        blocks = last_block + 1 - first_block
        low, high = last_head, first_head  # of this thread
        for head in range(first_head, last_head):
            if read * size // every == rank:
                low, high = min(low, head), head + 1
            read += count * blocks
        side_by_side = max(1, MOST_SCORES // (members * blocks * BLOCK_SIZE))
        for begin in range(low, high, side_by_side):
            end = min(begin + side_by_side, high)
            queries, query_row = asked, row * heads + begin * group
            if count > 1:
                for head in range(begin, end):
                    for member in range(members):
                        at = (row + member // group) * heads + head * group + member % group
                        copy_into(together[(head - begin) * members + member], asked[at])
                queries, query_row = together, _ZERO
            scores = np.empty(((end - begin) * members, blocks * BLOCK_SIZE), dtype=np.float32)
            _attend_heads(
                queries, query_row, members, group, key_cache, value_cache, table,
                first_block, last_block, begin, end, start, stop, factor, cap,
                scores, totals, lanes, sums,
            )  # fmt: skip
            for each in range(scores.shape[0]):
                r, h = each % members // group, each % group
                total, own = totals[each], sums[each]
                there = out[row + r, (begin + each // members) * group + h]
                for j in range(width):
                    there[j] = own[j] / total
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
