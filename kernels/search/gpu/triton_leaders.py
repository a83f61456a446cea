"""From estimates to leaders and thresholds: the first launches of a search."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.noise.triton_kernel import block_draw
from kernels.search.gpu.triton_adjust import adjusted, softcapped
from kernels.search.gpu.triton_bounds import (
    C_BLOCK,
    C_ENTRY,
    C_EXACT_SOFTCAP_ERROR,
    C_FEW,
    C_GREEDY,
    C_GUMBEL,
    C_INTEGERS,
    C_NOISE_ROUNDING,
    C_REALS,
    C_TILE_BLOCKS,
    C_TOP_K,
    noise_of,
    scale_of,
    upper_bound,
)


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
    kind = tl.load(integers + row * C_INTEGERS)
    if kind >= 0:
        block = tl.program_id(0) * C_TILE_BLOCKS + tl.arange(0, C_TILE_BLOCKS)
        ids = block[:, None] * C_BLOCK + tl.arange(0, C_BLOCK)[None, :]
        inside = ids < size
        value = tl.load(values + row * width + ids, mask=inside, other=float("-inf"))
        highest = tl.max(upper_bound(value, row_slack, factors, row, ids, inside, slack_width), 1)
        best = tl.max(value, 1)
        scale = scale_of(integers, reals, row)
        ceiling = highest.to(tl.float64) * scale
        promise = best.to(tl.float64)
        if kind == C_GUMBEL:
            # Of a block's tokens, the likeliest and the one with most noise are good for a guess.
            likeliest = tl.min(tl.where(value == best[:, None], ids, 2147483647), 1)
            promise = promise * scale + noise_of(integers, row, likeliest, token_ids, size, OWNED)
            if OWNED == 2:
                ceiling = tl.where(highest > float("-inf"), float("inf"), ceiling)
            else:
                number = block
                if OWNED == 1:
                    first = block * C_BLOCK
                    number = tl.load(token_ids + first, mask=first < size, other=0) // C_BLOCK
                smallest, winner = block_draw(
                    number.to(tl.uint32),
                    tl.load(integers + row * C_INTEGERS + 2),
                    tl.load(integers + row * C_INTEGERS + 3),
                    tl.load(integers + row * C_INTEGERS + 4),
                )
                highest_noise = -tl.log(smallest)
                ceiling += highest_noise + C_NOISE_ROUNDING
                won = block * C_BLOCK + winner.to(tl.int32)
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
    kind = tl.load(integers + row * C_INTEGERS)
    if kind >= 0:
        k = tl.load(integers + row * C_INTEGERS + 1)
        wanted = tl.minimum(tl.where(kind == C_TOP_K, k, C_FEW), LEADERS).to(tl.int32)
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
    kind = tl.load(integers + row * C_INTEGERS)
    if kind >= 0:
        place = tl.arange(0, LEADERS * C_BLOCK)
        present = place // C_BLOCK < tl.load(chosen_counts + row)
        block = tl.load(chosen + row * LEADERS + place // C_BLOCK, mask=present, other=0)
        ids = block * C_BLOCK + place % C_BLOCK
        inside = present & (ids < size)
        value = tl.load(values + row * width + ids, mask=inside, other=float("-inf"))
        score = value
        if kind == C_GUMBEL:
            scaled = value.to(tl.float64) * scale_of(integers, reals, row)
            noise = noise_of(integers, row, ids, token_ids, size, OWNED)
            score = (scaled + noise).to(tl.float32)
        k = tl.load(integers + row * C_INTEGERS + 1)
        wanted = tl.minimum(tl.where(kind == C_TOP_K, k, C_FEW), LEADERS).to(tl.int32)
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
        probe = tl.load(entries + middle * C_ENTRY + 1, mask=searching, other=0)
        below = probe < tokens
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (probe >= tokens), middle, high)
        span = span >> 1
    found = low < stop
    return low, found & (tl.load(entries + low * C_ENTRY + 1, mask=found, other=-1) == tokens)


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
    kind = tl.load(integers + row * C_INTEGERS)
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
            capped = softcapped(logit.to(tl.float64), cap) - C_EXACT_SOFTCAP_ERROR * cap
            logit = capped.to(tl.float32)
        start = tl.load(offsets + row)
        stop = tl.load(offsets + row + 1)
        if stop > start:
            entry, found = _lookup(entries, start, stop, ids)
            logit = adjusted(logit, terms, entry, found & inside)
        logit = tl.where(inside, logit, float("-inf"))
        score = logit.to(tl.float64) * scale_of(integers, reals, row)
        if kind == C_TOP_K:
            k = tl.load(integers + row * C_INTEGERS + 1).to(tl.int32)
            kept = _best(logit, tl.minimum(k, LEADERS)) & inside
            least = tl.min(tl.where(kept, score, float("inf")), 0)
            threshold = tl.where(count >= k, least, float("-inf"))
        elif kind == C_GUMBEL:
            noise = noise_of(integers, row, ids, token_ids, size, OWNED)
            threshold = tl.max(score + noise, 0) - C_NOISE_ROUNDING
        else:
            threshold = tl.max(score, 0)
            if kind != C_GREEDY:
                threshold += tl.load(reals + row * C_REALS + 1)
        tl.store(thresholds + row, threshold)
