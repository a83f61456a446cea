"""The fused dense draw in Triton: a tile of logits on the tensor cores, its noise, its best token.

A program multiplies a tile of weight rows with a tile of hidden rows, adds the noise and keeps the
best score of each hidden row; a second kernel takes the best of all tiles. The noise is that of
`kernels.noise` with its last logarithms in fp32, so a score errs by a few units in its last place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.dense.types import Draws
from lexshard.kernels.noise.triton_kernel import block_draw, token_word

LARGEST_HIDDEN_ROWS = 64  # of a program

_MANY_COLUMNS = tl.constexpr(64)  # hidden rows whose noise is drawn in quarters
_BLOCK = tl.constexpr(BLOCK)
_OFFSET_MASK = tl.constexpr(BLOCK - 1)


class DeviceDraws(NamedTuple):
    """`kernels.dense.Draws` on a device."""

    integers: torch.Tensor  # [N, 3] int64: low and high half of the key, position
    scale: torch.Tensor  # [N] fp32
    greedy: bool  # whether every row is


def place(draws: Draws, device: torch.device | str) -> DeviceDraws:
    key = torch.from_numpy(draws.key.view("int64"))
    position = torch.from_numpy(draws.position.view("int64"))
    integers = torch.stack([key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, position], dim=1)
    scale = torch.from_numpy(draws.inverse_temperature).float()
    return DeviceDraws(integers.to(device), scale.to(device), not bool(scale.any()))


@triton.jit
def _noise(  # type: ignore[no-untyped-def]
    first, key_low, key_high, position, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """fp32 noise [ROWS, COLUMNS] of the ids from ``first`` on; ``first`` begins a block."""
    blocks = (first // _BLOCK + tl.arange(0, ROWS // _BLOCK))[:, None]
    blocks = tl.broadcast_to(blocks, (ROWS // _BLOCK, COLUMNS)).to(tl.uint32)
    smallest, winner = block_draw(blocks, key_low, key_high, position)
    shape: tl.constexpr = (ROWS // _BLOCK, _BLOCK, COLUMNS)
    smallest = tl.reshape(
        tl.broadcast_to(smallest.to(tl.float32)[:, None, :], shape), (ROWS, COLUMNS)
    )
    winner = tl.reshape(tl.broadcast_to(winner[:, None, :], shape), (ROWS, COLUMNS))
    ids = tl.broadcast_to((first + tl.arange(0, ROWS))[:, None], (ROWS, COLUMNS)).to(tl.uint32)
    word = token_word(ids, key_low, key_high, position)
    fresh = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # Near 1 the difference is 0 and the exponential infinite: such a token cannot win.
    exponential = smallest - tl.log(1.0 - fresh)
    return -tl.log(tl.where((ids & _OFFSET_MASK) == winner, smallest, exponential))


@triton.jit
def _keep_best(  # type: ignore[no-untyped-def]
    logits,
    integers,
    scale,
    best_scores,
    best_ids,
    first,
    query,
    count,
    size,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """The best score of each of the hidden rows ``query`` [COLUMNS] in a tile of logits."""
    row = first + tl.arange(0, ROWS)
    present = query < count
    score = logits
    if not GREEDY:
        slope = tl.load(scale + query, mask=present, other=0.0)[None, :]
        key_low = tl.load(integers + query * 3, mask=present, other=0)[None, :]
        key_high = tl.load(integers + query * 3 + 1, mask=present, other=0)[None, :]
        position = tl.load(integers + query * 3 + 2, mask=present, other=0)[None, :]
        noise = _noise(first, key_low, key_high, position, ROWS, COLUMNS)
        score = tl.where(slope > 0.0, logits * slope + noise, logits)
    score = tl.where((row < size)[:, None], score, float("-inf"))
    best = tl.max(score, 0)
    # Ties go to the lower id.
    chosen = tl.min(tl.where(score == best[None, :], row[:, None], 2147483647), 0)
    place_of_best = query.to(tl.int64) * tiles + tl.program_id(0)
    tl.store(best_scores + place_of_best, best, mask=present)
    tl.store(best_ids + place_of_best, chosen, mask=present)


@triton.jit
def _tile_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    integers,
    scale,
    best_scores,
    best_ids,
    count,
    size,
    columns,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GREEDY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS weight rows x COLUMNS hidden rows, DEPTH columns of both at a time."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    first_query = tl.program_id(1) * COLUMNS
    query = first_query + tl.arange(0, COLUMNS)
    inside = row < size
    present = query < count
    depth = tl.arange(0, DEPTH)
    weight_rows = weight + row.to(tl.int64)[:, None] * columns
    hidden_rows = hidden + query.to(tl.int64)[None, :] * columns
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, columns, DEPTH):
        place = start + depth
        valid = place < columns
        w = tl.load(weight_rows + place[None, :], mask=inside[:, None] & valid[None, :], other=0.0)
        h = tl.load(hidden_rows + place[:, None], mask=present[None, :] & valid[:, None], other=0.0)
        logits = tl.dot(w, h, logits, input_precision=PRECISION)
    if COLUMNS < _MANY_COLUMNS or GREEDY:
        _keep_best(
            logits,
            integers,
            scale,
            best_scores,
            best_ids,
            first,
            query,
            count,
            size,
            tiles,
            ROWS,
            COLUMNS,
            GREEDY,
        )
    else:
        # A quarter of the hidden rows at a time: the noise of all takes more registers than there
        # are.
        quarter = first_query + 4 * tl.arange(0, COLUMNS // 4)
        even, odd = tl.split(tl.reshape(logits, (ROWS, COLUMNS // 2, 2)))
        zeroth, second = tl.split(tl.reshape(even, (ROWS, COLUMNS // 4, 2)))
        once, third = tl.split(tl.reshape(odd, (ROWS, COLUMNS // 4, 2)))
        _keep_best(
            zeroth,
            integers,
            scale,
            best_scores,
            best_ids,
            first,
            quarter,
            count,
            size,
            tiles,
            ROWS,
            COLUMNS // 4,
            GREEDY,
        )
        _keep_best(
            once,
            integers,
            scale,
            best_scores,
            best_ids,
            first,
            quarter + 1,
            count,
            size,
            tiles,
            ROWS,
            COLUMNS // 4,
            GREEDY,
        )
        _keep_best(
            second,
            integers,
            scale,
            best_scores,
            best_ids,
            first,
            quarter + 2,
            count,
            size,
            tiles,
            ROWS,
            COLUMNS // 4,
            GREEDY,
        )
        _keep_best(
            third,
            integers,
            scale,
            best_scores,
            best_ids,
            first,
            quarter + 3,
            count,
            size,
            tiles,
            ROWS,
            COLUMNS // 4,
            GREEDY,
        )


@triton.jit
def _reduce_kernel(best_scores, best_ids, tokens, tiles, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((TILES,), float("-inf"), tl.float32)
    ids = tl.full((TILES,), 2147483647, tl.int32)
    for start in range(0, tiles, TILES):
        place = start + tl.arange(0, TILES)
        inside = place < tiles
        score = tl.load(best_scores + row * tiles + place, mask=inside, other=float("-inf"))
        token = tl.load(best_ids + row * tiles + place, mask=inside, other=2147483647)
        better = score > best  # a later tile has higher ids
        best = tl.where(better, score, best)
        ids = tl.where(better, token, ids)
    highest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == highest, ids, 2147483647), 0)
    tl.store(tokens + row, chosen.to(tl.int64))


def dense_gumbel(hidden: torch.Tensor, weight: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
    """Token ids [N] of ``hidden`` [N, d] in the type of ``weight`` [V, d]; waits for nothing."""
    count, columns = hidden.shape
    size = weight.shape[0]
    device = weight.device
    # The tensor cores want 16 rows of either.
    queries = min(max(triton.next_power_of_2(count), 16), LARGEST_HIDDEN_ROWS)
    rows = 128
    depth = 64 if weight.dtype == torch.bfloat16 else 32
    tiles = triton.cdiv(size, rows)
    best_scores = torch.empty(count, tiles, dtype=torch.float32, device=device)
    best_ids = torch.empty(count, tiles, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    _tile_kernel[(tiles, triton.cdiv(count, queries))](
        hidden.contiguous(),
        weight,
        draws.integers,
        draws.scale,
        best_scores,
        best_ids,
        count,
        size,
        columns,
        tiles,
        ROWS=rows,
        COLUMNS=queries,
        DEPTH=depth,
        GREEDY=draws.greedy,
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        num_warps=4 if queries <= 32 else 8,
        num_stages=4,
        enable_fp_fusion=True,
    )
    _reduce_kernel[(count,)](
        best_scores, best_ids, tokens, tiles, TILES=1024, enable_fp_fusion=True
    )
    return tokens
