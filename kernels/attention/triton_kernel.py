"""Paged attention in Triton: one kernel for variable query lengths, a second to join splits.

A program computes a tile, up to ``TILE_ROWS`` consecutive rows of one sequence, for the query heads
of one kv head (packed into one matrix, so that keys and values are read once) over one split of
the keys. Contexts longer than a split are cut at fixed positions and joined by a second kernel in
the order of positions, so how a row is split depends on the batch only by whether that has few
rows, which want more programs, or many, and by whether the longest context of few is a long one.

One program is launched per row; those whose row does not begin a tile end at once. So tiles need
no table, and nothing here waits for the GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lexshard.kernels.attention.layout import BLOCK_SIZE

SPLIT_KEYS = 1024
# A row of 8 kv heads would be 8 programs for 1,024 keys, on 132 multiprocessors; but a program that
# joins splits reads them one after the other.
FEW_ROWS, MOST_SPLITS_OF_FEW = 32, 64
SPLIT_KEYS_OF_FEW = SPLIT_KEYS // 4
# Steps of more rows than this have work enough for every multiprocessor: longer splits then keep
# the partial sums of a step with a context of 131,072 tokens at some 130 MiB.
MANY_ROWS = 64
SPLIT_KEYS_OF_MANY = 8 * SPLIT_KEYS
SINGLE_ROWS = 4  # leave most of the GPU to each program
MASKED = tl.constexpr(-1.0e30)  # finite, so that a row masked in a whole tile makes no NaN


@triton.jit(do_not_specialize=["kv_heads"])
def _write(  # type: ignore[no-untyped-def]
    key,
    value,
    slots,
    key_cache,
    value_cache,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    kv_heads,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_COLUMN: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row)
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    cell, offset = (slot // BLOCK * kv_heads + head) * (WIDTH * BLOCK), slot % BLOCK
    own = tl.load(key + row * key_row_stride + head * key_head_stride + column, mask=inside)
    place = key_cache + cell + offset * KEY_TOKEN + column * KEY_COLUMN
    tl.store(place, own.to(key_cache.dtype.element_ty), mask=inside)
    own = tl.load(value + row * value_row_stride + head * value_head_stride + column, mask=inside)
    place = value_cache + cell + offset * WIDTH + column
    tl.store(place, own.to(value_cache.dtype.element_ty), mask=inside)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """See `kernels.attention.write_cache`: one launch."""
    rows, kv_heads, width = key.shape
    if rows == 0:
        return
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    _write[(rows, kv_heads)](
        key,
        value,
        slots,
        key_cache,
        value_cache,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_heads,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        BLOCK=BLOCK_SIZE,
        KEY_COLUMN=key_cache.stride(2),
        KEY_TOKEN=key_cache.stride(3),
        num_warps=1,
    )


# Counts that change from step to step: their values are nothing to compile for.
@triton.jit(do_not_specialize=["rows", "table_width", "splits", "window"])
def _attend(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    block_tables,
    row_sequence,
    positions,
    out,
    partial_sums,
    partial_maxima,
    partial_totals,
    scale,
    window,
    softcap,
    rows,
    heads,
    kv_heads,
    table_width,
    splits,
    query_row_stride,
    query_head_stride,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    SEVERAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_COLUMN: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(row_sequence + first)
    lowest = tl.load(positions + first)
    sequence_before = tl.load(row_sequence + first - 1, mask=first > 0, other=-1)
    position_before = tl.load(positions + first - 1, mask=first > 0, other=-2)
    continues = (sequence == sequence_before) & (lowest == position_before + 1)
    # Of splits that no row of the tile reaches nothing is read.
    reached = split * SPLIT < lowest + TILE_ROWS
    if ((lowest % TILE_ROWS == 0) | (continues == 0)) & reached:
        member = tl.arange(0, TILE_ROWS * GROUP_PADDED)
        offset_in_tile = member // GROUP_PADDED
        row = first + offset_in_tile
        position = lowest + offset_in_tile
        in_tile = (
            (row < rows)
            & (offset_in_tile < TILE_ROWS - lowest % TILE_ROWS)
            & (tl.load(row_sequence + row, mask=row < rows, other=-1) == sequence)
            & (tl.load(positions + row, mask=row < rows, other=-1) == position)
        )
        highest = tl.max(tl.where(in_tile, position, lowest), 0)
        in_group = member % GROUP_PADDED
        valid = in_tile & (in_group < GROUP)
        head = kv_head * GROUP + in_group
        column = tl.arange(0, WIDTH_PADDED)
        inside = column < WIDTH
        query_rows = (
            query + row[:, None].to(tl.int64) * query_row_stride + head[:, None] * query_head_stride
        )
        if PARTS == 1:
            q = tl.load(
                query_rows + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0
            )
        begin = split * SPLIT
        stop = tl.minimum(highest + 1, begin + SPLIT)
        if window > 0:
            begin = tl.maximum(begin, tl.maximum(lowest + 1 - window, 0) // TILE_KEYS * TILE_KEYS)

        maxima = tl.full((TILE_ROWS * GROUP_PADDED,), MASKED, tl.float32)
        totals = tl.zeros((TILE_ROWS * GROUP_PADDED,), tl.float32)
        sums = tl.zeros((TILE_ROWS * GROUP_PADDED, WIDTH_PADDED), tl.float32)
        for base in range(begin, stop, TILE_KEYS):
            place = base + tl.arange(0, TILE_KEYS)
            written = place <= highest
            block = tl.load(
                block_tables + sequence.to(tl.int64) * table_width + place // BLOCK,
                mask=written,
                other=0,
            ).to(tl.int64)
            offset = place % BLOCK
            cell = (block * kv_heads + kv_head) * (WIDTH * BLOCK)
            scores = tl.zeros((TILE_ROWS * GROUP_PADDED, TILE_KEYS), tl.float32)
            for piece in tl.static_range(PARTS):
                some = piece * (WIDTH_PADDED // PARTS) + tl.arange(0, WIDTH_PADDED // PARTS)
                if PARTS > 1:  # too wide to stay in registers: read again, from the nearest cache
                    q = tl.load(
                        query_rows + some[None, :],
                        mask=valid[:, None] & (some < WIDTH)[None, :],
                        other=0.0,
                    )
                keys = tl.load(
                    key_cache + (cell + offset * KEY_TOKEN)[:, None] + (some * KEY_COLUMN)[None, :],
                    mask=written[:, None] & (some < WIDTH)[None, :],
                    other=0.0,
                )
                scores = tl.dot(q, tl.trans(keys), scores, input_precision=PRECISION)
            scores *= scale
            if SOFTCAP:
                ratio = scores / softcap
                small = tl.exp(-2.0 * tl.abs(ratio))
                size = (1.0 - small) / (1.0 + small)
                scores = softcap * tl.where(ratio < 0, -size, size)
            attended = place[None, :] <= position[:, None]
            if window > 0:
                attended &= place[None, :] > position[:, None] - window
            scores = tl.where(attended, scores, MASKED)
            larger = tl.maximum(maxima, tl.max(scores, 1))
            weights = tl.where(attended, tl.exp(scores - larger[:, None]), 0.0)
            correction = tl.exp(maxima - larger)
            totals = totals * correction + tl.sum(weights, 1)
            values = tl.load(
                value_cache + (cell + offset * WIDTH)[:, None] + column[None, :],
                mask=written[:, None] & inside[None, :],
                other=0.0,
            )
            sums = sums * correction[:, None]
            sums += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
            maxima = larger

        place_out = row.to(tl.int64) * heads + head
        if not SEVERAL:
            result = sums / tl.where(valid, totals, 1.0)[:, None]
            tl.store(
                out + place_out[:, None] * WIDTH + column[None, :],
                result.to(out.dtype.element_ty),
                mask=valid[:, None] & inside[None, :],
            )
        else:
            part = place_out * splits + split
            tl.store(partial_maxima + part, maxima, mask=valid)
            tl.store(partial_totals + part, totals, mask=valid)
            tl.store(
                partial_sums + part[:, None] * WIDTH + column[None, :],
                sums,
                mask=valid[:, None] & inside[None, :],
            )


@triton.jit(do_not_specialize=["splits"])
def _join(  # type: ignore[no-untyped-def]
    partial_sums,
    partial_maxima,
    partial_totals,
    positions,
    out,
    heads,
    splits,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Splits of one row and head in the order of positions; later splits of a row are not read."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    place = row.to(tl.int64) * heads + head
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    used = tl.load(positions + row) // SPLIT + 1
    largest = tl.load(partial_maxima + place * splits)
    for split in range(1, used):
        largest = tl.maximum(largest, tl.load(partial_maxima + place * splits + split))
    total = 0.0
    sums = tl.zeros((WIDTH_PADDED,), tl.float32)
    for split in range(used):
        part = place * splits + split
        weight = tl.exp(tl.load(partial_maxima + part) - largest)
        total += weight * tl.load(partial_totals + part)
        sums += weight * tl.load(partial_sums + part * WIDTH + column, mask=inside, other=0.0)
    tl.store(out + place * WIDTH + column, (sums / total).to(out.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """What registers hold of a program's work."""

    members: int  # query rows times heads
    keys: int
    parts: int = 1  # that queries are read in
    warps: int = 4


def _tile(rows: int, width_padded: int, number_bytes: int) -> Tile:
    """For steps of so many rows. Up to `MANY_ROWS` are single rows of many sequences, as a rule: a
    large tile would compute rows that there are not, and keep others from the multiprocessor.

    Measured on an H100 with 8 kv heads of 4 query heads and 128 columns (docs/gpu.md).
    """
    wide = width_padded >= 256
    if number_bytes > 2:  # twice the registers for what is read in parts
        return Tile(16, 16, width_padded // 64, warps=8) if wide else Tile(16, 32)
    if rows > MANY_ROWS and not wide:
        return Tile(64, 32)
    return Tile(16, 128) if rows <= SINGLE_ROWS and not wide else Tile(16, 32)


def _split_keys(rows: int, context: int) -> int:
    """Keys of a split, for steps of so many rows with a ``context`` of so many keys at most."""
    if rows <= FEW_ROWS and context <= MOST_SPLITS_OF_FEW * SPLIT_KEYS_OF_FEW:
        return SPLIT_KEYS_OF_FEW
    return SPLIT_KEYS if rows <= MANY_ROWS else SPLIT_KEYS_OF_MANY


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
    split_keys: int | None = None,
) -> torch.Tensor:
    """See `kernels.attention.paged_attention`. Sums in float32; ``split_keys`` is for tests."""
    rows, heads, width = query.shape
    if rows == 0:
        return out
    if split_keys is None:
        split_keys = _split_keys(rows, block_tables.shape[1] * BLOCK_SIZE)
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    group_padded = triton.next_power_of_2(group)
    width_padded = max(16, triton.next_power_of_2(width))
    tile = _tile(rows, width_padded, query.element_size())
    tile_rows = max(1, min(tile.members // group_padded, triton.next_power_of_2(rows)))
    tile_rows = max(tile_rows, 16 // group_padded)  # tl.dot wants 16 rows
    splits = max(1, triton.cdiv(block_tables.shape[1] * BLOCK_SIZE, split_keys))
    if query.stride(2) != 1:
        query = query.contiguous()
    shape: Any = (rows, heads, splits) if splits > 1 else (1,)
    partial_maxima = torch.empty(shape, device=query.device, dtype=torch.float32)
    partial_totals = torch.empty_like(partial_maxima)
    partial_sums = torch.empty((*shape, width), device=query.device, dtype=torch.float32)
    _attend[(rows, kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        row_sequence,
        positions,
        out,
        partial_sums,
        partial_maxima,
        partial_totals,
        scale,
        window,
        softcap,
        rows,
        heads,
        kv_heads,
        block_tables.stride(0),
        splits,
        query.stride(0),
        query.stride(1),
        WIDTH=width,
        WIDTH_PADDED=width_padded,
        GROUP=group,
        GROUP_PADDED=group_padded,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile.keys,
        PARTS=tile.parts,
        SPLIT=split_keys,
        SEVERAL=splits > 1,
        SOFTCAP=softcap > 0,
        BLOCK=BLOCK_SIZE,
        KEY_COLUMN=key_cache.stride(2),
        KEY_TOKEN=key_cache.stride(3),
        # Three products of halves: nearly float32, on the tensor cores. Without them a product
        # keeps whole rows in registers, thousands of bytes more than there are.
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
    )
    if splits > 1:
        _join[(rows, heads)](
            partial_sums,
            partial_maxima,
            partial_totals,
            positions,
            out,
            heads,
            splits,
            WIDTH=width,
            WIDTH_PADDED=width_padded,
            SPLIT=split_keys,
        )
    return out
