"""From leaders to candidates: the last launches of a search."""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.rows.triton_kernel import row_dots
from lexshard.kernels.search.gpu.triton_bounds import (
    C_GREEDY,
    C_GUMBEL,
    C_INTEGERS,
    C_NOISE_ROUNDING,
    C_REALS,
    C_TILE,
    C_TILE_BLOCKS,
    C_TOP_K,
    noise_of,
    scale_of,
    upper_bound,
)


@triton.jit
def _threshold(leader_scores, leader_counts, integers, reals, row, LEADERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A score that the row's answer certainly reaches: the best leader's or, of the k best tokens,
    the least of k leaders'."""
    kind = tl.load(integers + row * C_INTEGERS)
    count = tl.load(leader_counts + row)
    place = tl.arange(0, LEADERS)
    inside = place < count
    score = tl.load(leader_scores + row * LEADERS + place, mask=inside, other=float("-inf"))
    threshold = tl.max(score, 0)
    if kind == C_TOP_K:
        least = tl.min(tl.where(inside, score, float("inf")), 0)
        enough = count >= tl.load(integers + row * C_INTEGERS + 1)
        threshold = tl.where(enough, least, float("-inf"))
    elif (kind != C_GREEDY) & (kind != C_GUMBEL):
        threshold += tl.load(reals + row * C_REALS + 1)
    return threshold


@triton.jit
def collect_kernel(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    factors,
    integers,
    reals,
    token_ids,
    draws,
    winners,
    leader_scores,
    leader_counts,
    ceilings,
    thresholds,
    tile_counts,
    found,
    size,
    width,
    slack_width,
    blocks,
    tiles,
    LEADERS: tl.constexpr,
    OWNED: tl.constexpr,
):
    """The ids of each tile whose upper bound reaches the threshold of the row, sorted, and how many
    they are: none where no block can reach it."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    count = 0
    kind = tl.load(integers + row * C_INTEGERS)
    if kind >= 0:
        threshold = _threshold(leader_scores, leader_counts, integers, reals, row, LEADERS)
        if tile == 0:
            tl.store(thresholds + row, threshold)
        block = tile * C_TILE_BLOCKS + tl.arange(0, C_TILE_BLOCKS)
        ceiling = tl.load(ceilings + row * blocks + block, mask=block < blocks, other=float("-inf"))
        opened = (ceiling >= threshold) & (block < blocks)
        if tl.max(opened.to(tl.int32), 0) > 0:
            ids = tile * C_TILE + tl.arange(0, C_TILE)
            inside = ids < size
            value = tl.load(values + row * width + ids, mask=inside, other=float("-inf"))
            upper = upper_bound(value, row_slack, factors, row, ids, inside, slack_width)
            score = upper.to(tl.float64) * scale_of(integers, reals, row)
            if kind == C_GUMBEL:
                noise = noise_of(integers, row, ids, token_ids, draws, winners, size, blocks, OWNED)
                score += noise + C_NOISE_ROUNDING
            reaching = (score >= threshold) & (value > float("-inf"))
            rank = tl.cumsum(reaching.to(tl.int32), 0) - 1
            tl.store(found + (row * tiles + tile) * C_TILE + rank, ids, mask=reaching)
            count = tl.sum(reaching.to(tl.int32), 0)
    tl.store(tile_counts + row * tiles + tile, count)


@triton.jit
def candidates_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    tile_counts,
    found,
    candidates,
    counts,
    logits,
    columns,
    weight_stride,
    tiles,
    capacity,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The ids of all tiles in one list, as far as there is room, and their canonical products."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, TILES)
    total = tl.sum(tl.load(tile_counts + row * tiles + tile, mask=tile < tiles, other=0), 0)
    if tl.program_id(0) == 0:
        tl.store(counts + row, total)
    kept = tl.minimum(total, capacity)
    for first in range(tl.program_id(0) * TOKENS, kept, tl.num_programs(0) * TOKENS):
        index = first + tl.arange(0, TOKENS)
        inside = index < kept
        # Loaded again: kept from above, they would take registers from the products.
        in_tile = tl.load(tile_counts + row * tiles + tile, mask=tile < tiles, other=0)
        until = tl.cumsum(in_tile, 0)
        earlier = until[None, :] <= index[:, None]
        own_tile = tl.sum(earlier.to(tl.int32), 1)
        before = tl.max(tl.where(earlier, until[None, :], 0), 1)
        place = (row * tiles + own_tile) * C_TILE + index - before
        ids = tl.load(found + place, mask=inside, other=0)
        dots = row_dots(
            hidden + row * columns,
            weight,
            ids.to(tl.int64),
            inside,
            columns,
            weight_stride,
            TOKENS,
            UNROLL,
        )
        tl.store(candidates + row * capacity + index, ids, mask=inside)
        tl.store(logits + row * capacity + index, dots, mask=inside)
