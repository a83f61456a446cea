"""The search in Triton: a fixed sequence of launches, fixed buffers, no value read by the host.

Ids come in blocks of 64, those of the noise, and blocks in tiles of 16. A launch either visits all
ids once (`summary_kernel`) or decides from per-block figures which ids it must visit. Everything
is written to places that depend on ids alone, so results do not depend on scheduling.

Arithmetic that decides (bounds, thresholds) is fp32 or float64 without fused multiply-adds.

Ids number the rows that are searched. ``OWNED`` says which tokens of the vocabulary they are, by
whose ids noise is drawn: the same (0), or ``token_ids``, of which every 64 are a block of the
vocabulary (1) or not (2): then no block has a bound on its noise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.blocks import BLOCK
from kernels.noise.triton_kernel import block_draw, gumbel_of
from kernels.rounding import NOISE_ROUNDING, ULP_SHARE
from kernels.search import kinds
from kernels.search.gpu.triton_adjust import ENTRY, REALS, TILE, adjusted, softcapped

ALL_TOKENS, WHOLE_BLOCKS, ANY_TOKENS = 0, 1, 2  # what `OWNED` says
IDLE = -1  # the kind of a row that asks for nothing
FEW = 4  # leaders of a row that wants one token: the best estimate need not be the best logit
INTEGERS = 5  # kind, k, low and high half of the key, position

_GREEDY = tl.constexpr(kinds.GREEDY)
_GUMBEL = tl.constexpr(kinds.GUMBEL)
_TOP_K = tl.constexpr(kinds.TOP_K)
_FEW = tl.constexpr(FEW)
_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(TILE)
_TILE_BLOCKS = tl.constexpr(TILE // BLOCK)
_INTEGERS = tl.constexpr(INTEGERS)
_REALS = tl.constexpr(REALS)
_ENTRY = tl.constexpr(ENTRY)
_ULP_SHARE = tl.constexpr(float(ULP_SHARE))
_NOISE_ROUNDING = tl.constexpr(NOISE_ROUNDING)
_EXACT_SOFTCAP_ERROR = tl.constexpr(2.0**-40)


@triton.jit
def _upper(value, row_slack, factors, row, ids, inside, slack_width):  # type: ignore[no-untyped-def]
    """Upper bounds in fp32; excluded ids stay at -inf."""
    error = tl.load(factors + row * 3)
    size = tl.load(factors + row * 3 + 1)
    rest = tl.load(factors + row * 3 + 2)
    errors = tl.load(row_slack + ids, mask=inside, other=0.0)
    sizes = tl.load(row_slack + slack_width + ids, mask=inside, other=0.0)
    slack = error * errors + size * sizes + rest + tl.abs(value) * _ULP_SHARE
    upper = tl.where(slack < float("inf"), value + slack, float("inf"))
    return tl.where(value > float("-inf"), upper, float("-inf"))


@triton.jit
def _scale(integers, reals, row):  # type: ignore[no-untyped-def]
    """What a row multiplies its logits with before it compares them, float64."""
    kind = tl.load(integers + row * _INTEGERS)
    scale = tl.load(reals + row * _REALS)
    return tl.where((kind == _GREEDY) | (kind == _TOP_K), 1.0, scale)


@triton.jit
def _noise(integers, row, ids, token_ids, size, OWNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gumbel noise of int32 ids, float64."""
    tokens = ids
    if OWNED > 0:
        tokens = tl.load(token_ids + ids, mask=ids < size, other=0)
    noise = gumbel_of(
        tokens,
        tl.load(integers + row * _INTEGERS + 2),
        tl.load(integers + row * _INTEGERS + 3),
        tl.load(integers + row * _INTEGERS + 4),
    )
    return noise.to(tl.float64)


@triton.jit
def summary_kernel(  # type: ignore[no-untyped-def]
    values,
    row_slack,
    factors,
    integers,
    reals,
    token_ids,
    tops,
    ceilings,
    promises,
    size,
    width,
    slack_width,
    blocks,
    OWNED: tl.constexpr,
):
    """Per block the largest upper bound, a bound on every score, and what the best estimate
    promises."""
    row = tl.program_id(1).to(tl.int64)
    kind = tl.load(integers + row * _INTEGERS)
    if kind >= 0:
        block = tl.program_id(0) * _TILE_BLOCKS + tl.arange(0, _TILE_BLOCKS)
        ids = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        inside = ids < size
        value = tl.load(values + row * width + ids, mask=inside, other=float("-inf"))
        highest = tl.max(_upper(value, row_slack, factors, row, ids, inside, slack_width), 1)
        best = tl.max(value, 1)
        scale = _scale(integers, reals, row)
        ceiling = highest.to(tl.float64) * scale
        promise = best.to(tl.float64)
        if kind == _GUMBEL:
            # Of a block's tokens, the likeliest and the one with most noise are good for a guess.
            likeliest = tl.min(tl.where(value == best[:, None], ids, 2147483647), 1)
            promise = promise * scale + _noise(integers, row, likeliest, token_ids, size, OWNED)
            if OWNED == 2:
                ceiling = tl.where(highest > float("-inf"), float("inf"), ceiling)
            else:
                number = block
                if OWNED == 1:
                    first = block * _BLOCK
                    number = tl.load(token_ids + first, mask=first < size, other=0) // _BLOCK
                smallest, winner = block_draw(
                    number.to(tl.uint32),
                    tl.load(integers + row * _INTEGERS + 2),
                    tl.load(integers + row * _INTEGERS + 3),
                    tl.load(integers + row * _INTEGERS + 4),
                )
                highest_noise = -tl.log(smallest)
                ceiling += highest_noise + _NOISE_ROUNDING
                won = block * _BLOCK + winner.to(tl.int32)
                winning = tl.load(values + row * width + won, mask=won < size, other=float("-inf"))
                promise = tl.maximum(promise, winning.to(tl.float64) * scale + highest_noise)
        tl.store(tops + row * blocks + block, highest, mask=block < blocks)
        tl.store(ceilings + row * blocks + block, ceiling, mask=block < blocks)
        tl.store(promises + row * blocks + block, promise.to(tl.float32), mask=block < blocks)


@triton.jit
def _best(values, wanted):  # type: ignore[no-untyped-def]
    """Where the ``wanted`` largest of fp32 ``values`` [SIZE] stand, ties to the lower place."""
    bits = values.to(tl.int32, bitcast=True)
    # Integers that order as the values do.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    low = tl.min(key, 0)
    high = tl.max(key, 0)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((key >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    above = key > low
    equal = key == low
    room = wanted - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))


@triton.jit
def select_kernel(  # type: ignore[no-untyped-def]
    tops,
    promises,
    integers,
    largest,
    chosen,
    chosen_counts,
    blocks,
    BLOCKS: tl.constexpr,
    LEADERS: tl.constexpr,
):
    """The blocks that hold the leaders (the k best tokens lie in the k best blocks), and the
    largest upper bound of all."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(integers + row * _INTEGERS)
    if kind >= 0:
        k = tl.load(integers + row * _INTEGERS + 1)
        wanted = tl.minimum(tl.where(kind == _TOP_K, k, _FEW), LEADERS).to(tl.int32)
        block = tl.arange(0, BLOCKS)
        inside = block < blocks
        top = tl.load(tops + row * blocks + block, mask=inside, other=float("-inf"))
        tl.store(largest + row, tl.max(top, 0))
        promise = tl.load(promises + row * blocks + block, mask=inside, other=float("-inf"))
        kept = _best(promise, wanted) & (promise > float("-inf"))
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(chosen + row * LEADERS + place, block, mask=kept)
        tl.store(chosen_counts + row, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def leaders_kernel(  # type: ignore[no-untyped-def]
    values,
    integers,
    reals,
    token_ids,
    chosen,
    chosen_counts,
    leaders,
    leader_counts,
    size,
    width,
    LEADERS: tl.constexpr,
    OWNED: tl.constexpr,
):
    """The best estimates of the chosen blocks, sorted by id."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(integers + row * _INTEGERS)
    if kind >= 0:
        place = tl.arange(0, LEADERS * _BLOCK)
        present = place // _BLOCK < tl.load(chosen_counts + row)
        block = tl.load(chosen + row * LEADERS + place // _BLOCK, mask=present, other=0)
        ids = block * _BLOCK + place % _BLOCK
        inside = present & (ids < size)
        value = tl.load(values + row * width + ids, mask=inside, other=float("-inf"))
        score = value
        if kind == _GUMBEL:
            scaled = value.to(tl.float64) * _scale(integers, reals, row)
            noise = _noise(integers, row, ids, token_ids, size, OWNED)
            score = (scaled + noise).to(tl.float32)
        k = tl.load(integers + row * _INTEGERS + 1)
        wanted = tl.minimum(tl.where(kind == _TOP_K, k, _FEW), LEADERS).to(tl.int32)
        kept = _best(score, wanted) & (score > float("-inf"))
        rank = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(leaders + row * LEADERS + rank, ids, mask=kept)
        tl.store(leader_counts + row, tl.sum(kept.to(tl.int32), 0))
    else:
        tl.store(leader_counts + row, 0)


@triton.jit
def _lookup(entries, start, stop, tokens):  # type: ignore[no-untyped-def]
    """Where ``tokens`` stand among the sorted ids of ``start:stop``, and whether they do."""
    low = tl.zeros_like(tokens).to(tl.int64) + start
    high = tl.zeros_like(tokens).to(tl.int64) + stop
    span = stop - start
    while span > 0:
        searching = low < high
        middle = (low + high) >> 1
        probe = tl.load(entries + middle * _ENTRY + 1, mask=searching, other=0)
        below = probe < tokens
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (probe >= tokens), middle, high)
        span = span >> 1
    found = low < stop
    return low, found & (tl.load(entries + low * _ENTRY + 1, mask=found, other=-1) == tokens)


@triton.jit
def thresholds_kernel(  # type: ignore[no-untyped-def]
    leaders,
    leader_counts,
    leader_logits,
    integers,
    reals,
    token_ids,
    bias,
    constants,
    entries,
    terms,
    offsets,
    thresholds,
    size,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LEADERS: tl.constexpr,
    OWNED: tl.constexpr,
):
    """From the leaders' canonical products a score that the row's answer certainly reaches."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(integers + row * _INTEGERS)
    if kind >= 0:
        place = tl.arange(0, LEADERS)
        count = tl.load(leader_counts + row)
        inside = place < count
        ids = tl.load(leaders + row * LEADERS + place, mask=inside, other=0)
        logit = tl.load(leader_logits + row * LEADERS + place, mask=inside, other=0.0)
        if BIAS:
            logit += tl.load(bias + ids, mask=inside, other=0.0)
        if SCALE:
            logit *= tl.load(constants + 4).to(tl.float32)
        if SOFTCAP:
            cap = tl.load(constants + 3)
            # The host's hyperbolic tangent may be a little lower.
            capped = softcapped(logit.to(tl.float64), cap) - _EXACT_SOFTCAP_ERROR * cap
            logit = capped.to(tl.float32)
        start = tl.load(offsets + row)
        stop = tl.load(offsets + row + 1)
        if stop > start:
            entry, found = _lookup(entries, start, stop, ids)
            logit = adjusted(logit, terms, entry, found & inside)
        logit = tl.where(inside, logit, float("-inf"))
        score = logit.to(tl.float64) * _scale(integers, reals, row)
        if kind == _TOP_K:
            k = tl.load(integers + row * _INTEGERS + 1).to(tl.int32)
            kept = _best(logit, tl.minimum(k, LEADERS)) & inside
            least = tl.min(tl.where(kept, score, float("inf")), 0)
            threshold = tl.where(count >= k, least, float("-inf"))
        elif kind == _GUMBEL:
            noise = _noise(integers, row, ids, token_ids, size, OWNED)
            threshold = tl.max(score + noise, 0) - _NOISE_ROUNDING
        else:
            threshold = tl.max(score, 0)
            if kind != _GREEDY:
                threshold += tl.load(reals + row * _REALS + 1)
        tl.store(thresholds + row, threshold)


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
    upper = _upper(value, row_slack, factors, row, ids, inside, slack_width)
    score = upper.to(tl.float64) * _scale(integers, reals, row)
    if tl.load(integers + row * _INTEGERS) == _GUMBEL:
        score += _noise(integers, row, ids, token_ids, size, OWNED) + _NOISE_ROUNDING
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
    if tl.load(integers + row * _INTEGERS) >= 0:
        block = tile * _TILE_BLOCKS + tl.arange(0, _TILE_BLOCKS)
        ceiling = tl.load(ceilings + row * blocks + block, mask=block < blocks, other=float("-inf"))
        opened = (ceiling >= tl.load(thresholds + row)) & (block < blocks)
        if tl.max(opened.to(tl.int32), 0) > 0:
            ids = tile * _TILE + tl.arange(0, _TILE)
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
            ids = tile * _TILE + tl.arange(0, _TILE)
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
