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
    raised,
    scale_of,
    slack_of,
)


@triton.jit
def _threshold(questions, buffers, row, LEADERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A score that the row's answer certainly reaches: the best leader's or, of the k best tokens,
    the least of k leaders'."""
    kind = tl.load(questions.integers + row * C_INTEGERS)
    count = tl.load(buffers.leader_counts + row)
    place = tl.arange(0, LEADERS)
    inside = place < count
    scores = buffers.leader_scores + row * LEADERS
    score = tl.load(scores + place, mask=inside, other=float("-inf"))
    threshold = tl.max(score, 0)
    if kind == C_TOP_K:
        least = tl.min(tl.where(inside, score, float("inf")), 0)
        enough = count >= tl.load(questions.integers + row * C_INTEGERS + 1)
        threshold = tl.where(enough, least, float("-inf"))
    elif (kind != C_GREEDY) & (kind != C_GUMBEL):
        threshold += tl.load(questions.reals + row * C_REALS + 1)
    return threshold


@triton.jit
def collect_kernel(  # type: ignore[no-untyped-def]
    screened, questions, draws, buffers, found, tiles, LEADERS: tl.constexpr, OWNED: tl.constexpr
):
    """The ids of each tile whose upper bound reaches the threshold of the row, sorted, and how many
    they are: none where no block can reach it."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    count = 0
    kind = tl.load(questions.integers + row * C_INTEGERS)
    if kind >= 0:
        threshold = _threshold(questions, buffers, row, LEADERS)
        if tile == 0:
            tl.store(buffers.thresholds + row, threshold)
        block = tile * C_TILE_BLOCKS + tl.arange(0, C_TILE_BLOCKS)
        present = block < draws.blocks
        ceilings = buffers.ceilings + row * draws.blocks
        ceiling = tl.load(ceilings + block, mask=present, other=float("-inf"))
        opened = (ceiling >= threshold) & present
        if tl.max(opened.to(tl.int32), 0) > 0:
            ids = tile * C_TILE + tl.arange(0, C_TILE)
            inside = ids < screened.size
            values = screened.estimates + row * screened.width
            value = tl.load(values + ids, mask=inside, other=float("-inf"))
            upper = raised(value, slack_of(screened, value, buffers.factors, row, ids, inside))
            score = upper.to(tl.float64) * scale_of(questions, row)
            if kind == C_GUMBEL:
                score += noise_of(questions, row, ids, draws, OWNED) + C_NOISE_ROUNDING
            reaching = (score >= threshold) & (value > float("-inf"))
            rank = tl.cumsum(reaching.to(tl.int32), 0) - 1
            tl.store(found + (row * tiles + tile) * C_TILE + rank, ids, mask=reaching)
            count = tl.sum(reaching.to(tl.int32), 0)
    tl.store(buffers.tile_counts + row * tiles + tile, count)


@triton.jit
def candidates_kernel(  # type: ignore[no-untyped-def]
    products,
    tile_counts,
    found,
    results,
    tiles,
    capacity,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The ids of all tiles in one list, as far as there is room, and their canonical products."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, TILES)
    counts = tile_counts + row * tiles
    total = tl.sum(tl.load(counts + tile, mask=tile < tiles, other=0), 0)
    if tl.program_id(0) == 0:
        tl.store(results.counts + row, total)
    kept = tl.minimum(total, capacity)
    for first in range(tl.program_id(0) * TOKENS, kept, tl.num_programs(0) * TOKENS):
        index = first + tl.arange(0, TOKENS)
        inside = index < kept
        # Loaded again: kept from above, they would take registers from the products.
        until = tl.cumsum(tl.load(counts + tile, mask=tile < tiles, other=0), 0)
        earlier = until[None, :] <= index[:, None]
        own_tile = tl.sum(earlier.to(tl.int32), 1)
        before = tl.max(tl.where(earlier, until[None, :], 0), 1)
        place = (row * tiles + own_tile) * C_TILE + index - before
        ids = tl.load(found + place, mask=inside, other=0)
        dots = row_dots(products, row, ids.to(tl.int64), inside, TOKENS, UNROLL)
        tl.store(results.candidates + row * capacity + index, ids, mask=inside)
        tl.store(results.logits + row * capacity + index, dots, mask=inside)
