"""From thresholds to candidates: the last launches of a search."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.search.gpu.triton_bounds import (
    C_GUMBEL,
    C_INTEGERS,
    C_NOISE_ROUNDING,
    C_TILE,
    C_TILE_BLOCKS,
    noise_of,
    scale_of,
    upper_bound,
)


@triton.jit
def _reaching(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    factors,
    integers,
    reals,
    token_ids,
    thresholds,
    row,
    ids,
    size,
    width,
    slack_width,
    OWNED: tl.constexpr,
):
    """Whether the upper bound of each id reaches the threshold of the row."""
    inside = ids < size
    value = tl.load(values + row * width + ids, mask=inside, other=float("-inf"))
    upper = upper_bound(value, row_slack, factors, row, ids, inside, slack_width)
    score = upper.to(tl.float64) * scale_of(integers, reals, row)
    if tl.load(integers + row * C_INTEGERS) == C_GUMBEL:
        score += noise_of(integers, row, ids, token_ids, size, OWNED) + C_NOISE_ROUNDING
    return (score >= tl.load(thresholds + row)) & (value > float("-inf"))


@triton.jit
def count_kernel(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    factors,
    integers,
    reals,
    token_ids,
    thresholds,
    ceilings,
    tile_counts,
    size,
    width,
    slack_width,
    blocks,
    tiles,
    OWNED: tl.constexpr,
):
    """How many candidates each tile has: none where no block can reach the threshold."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    count = 0
    if tl.load(integers + row * C_INTEGERS) >= 0:
        block = tile * C_TILE_BLOCKS + tl.arange(0, C_TILE_BLOCKS)
        ceiling = tl.load(ceilings + row * blocks + block, mask=block < blocks, other=float("-inf"))
        opened = (ceiling >= tl.load(thresholds + row)) & (block < blocks)
        if tl.max(opened.to(tl.int32), 0) > 0:
            ids = tile * C_TILE + tl.arange(0, C_TILE)
            reaching = _reaching(
                values,
                row_slack,
                factors,
                integers,
                reals,
                token_ids,
                thresholds,
                row,
                ids,
                size,
                width,
                slack_width,
                OWNED,
            )
            count = tl.sum(reaching.to(tl.int32), 0)
    tl.store(tile_counts + row * tiles + tile, count)


@triton.jit
def collect_kernel(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    factors,
    integers,
    reals,
    token_ids,
    thresholds,
    tile_counts,
    candidates,
    counts,
    size,
    width,
    slack_width,
    tiles,
    capacity,
    TILES: tl.constexpr,
    OWNED: tl.constexpr,
):
    """The candidates of a tile behind those of the tiles before it: sorted by id."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    own = tl.load(tile_counts + row * tiles + tile)
    last = tile == tiles - 1
    if (own > 0) | last:
        place = tl.arange(0, TILES)
        earlier = tl.load(tile_counts + row * tiles + place, mask=place < tile, other=0)
        before = tl.sum(earlier, 0)
        if last:
            tl.store(counts + row, before + own)
        if own > 0:
            ids = tile * C_TILE + tl.arange(0, C_TILE)
            reaching = _reaching(
                values,
                row_slack,
                factors,
                integers,
                reals,
                token_ids,
                thresholds,
                row,
                ids,
                size,
                width,
                slack_width,
                OWNED,
            )
            rank = before + tl.cumsum(reaching.to(tl.int32), 0) - 1
            keep = reaching & (rank < capacity)
            tl.store(candidates + row * capacity + rank, ids, mask=keep)
