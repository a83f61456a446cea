"""From hidden states to leaders and what they promise: the first launches of a search."""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.rows.triton_kernel import row_dots
from lexshard.kernels.search.gpu.triton_adjust import (
    adjusted_by,
    factors_of,
    finished,
    norm_of,
    store_factors,
)
from lexshard.kernels.search.gpu.triton_bounds import (
    C_BLOCK,
    C_EXACT_SOFTCAP_ERROR,
    C_FEW,
    C_GUMBEL,
    C_INTEGERS,
    C_NOISE_ROUNDING,
    C_TILE_BLOCKS,
    C_TOP_K,
    draw_blocks,
    noise_of,
    raised,
    scale_of,
    slack_by,
)

BLOCKS_AT_A_TIME = 256  # whose noise a program draws

_BLOCKS_AT_A_TIME = tl.constexpr(BLOCKS_AT_A_TIME)


@triton.jit
def begin_kernel(  # type: ignore[no-untyped-def]
    hidden, columns, questions, draws, norms, finite, OWNED: tl.constexpr, COLUMNS: tl.constexpr
):
    """What needs no estimates: the norms of hidden states, and the noise of blocks of ids.

    The first program of a row has its norm, the others its blocks.
    """
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) - 1
    if part < 0:
        norm = norm_of(hidden, row, columns, COLUMNS)
        tl.store(norms + row, norm)
        tl.store(finite + row, ((norm < float("inf")) & (norm == norm)).to(tl.int32))
    elif tl.load(questions.integers + row * C_INTEGERS) == C_GUMBEL:
        block = part * _BLOCKS_AT_A_TIME + tl.arange(0, _BLOCKS_AT_A_TIME)
        smallest, winner = draw_blocks(questions, row, block, draws, OWNED)
        inside = block < draws.blocks
        tl.store(draws.smallest + row * draws.blocks + block, smallest, mask=inside)
        tl.store(draws.winners + row * draws.blocks + block, winner.to(tl.int32), mask=inside)


@triton.jit
def summary_kernel(  # type: ignore[no-untyped-def]
    screened,
    questions,
    draws,
    buffers,
    constants,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OWNED: tl.constexpr,
):
    """Per block the largest upper bound, a bound on every score, and what the best estimate
    promises."""
    row = tl.program_id(1).to(tl.int64)
    kind = tl.load(questions.integers + row * C_INTEGERS)
    if kind >= 0:
        norm = tl.load(buffers.norms + row)
        error, length, rest = factors_of(
            norm, screened, questions.reals, constants, row, BIAS, SCALE, SOFTCAP
        )
        if tl.program_id(0) == 0:
            store_factors(buffers.factors, row, error, length, rest)
        block = tl.program_id(0) * C_TILE_BLOCKS + tl.arange(0, C_TILE_BLOCKS)
        ids = block[:, None] * C_BLOCK + tl.arange(0, C_BLOCK)[None, :]
        inside = ids < screened.size
        values = screened.estimates + row * screened.width
        value = tl.load(values + ids, mask=inside, other=float("-inf"))
        slack = slack_by(screened, value, error, length, rest, ids, inside)
        highest = tl.max(raised(value, slack), 1)
        best = tl.max(value, 1)
        scale = scale_of(questions, row)
        ceiling = highest.to(tl.float64) * scale
        promise = best.to(tl.float64)
        place, present = row * draws.blocks + block, block < draws.blocks
        if kind == C_GUMBEL:
            # Of a block's tokens, the likeliest and the one with most noise are good for a guess.
            likeliest = tl.min(tl.where(value == best[:, None], ids, 2147483647), 1)
            promise = promise * scale + noise_of(questions, row, likeliest, draws, OWNED)
            if OWNED == 2:
                ceiling = tl.where(highest > float("-inf"), float("inf"), ceiling)
            else:
                highest_noise = -tl.log(tl.load(draws.smallest + place, mask=present, other=1.0))
                ceiling += highest_noise + C_NOISE_ROUNDING
                won = block * C_BLOCK + tl.load(draws.winners + place, mask=present, other=0)
                winning = tl.load(values + won, mask=won < screened.size, other=float("-inf"))
                promise = tl.maximum(promise, winning.to(tl.float64) * scale + highest_noise)
        tl.store(buffers.tops + place, highest, mask=present)
        tl.store(buffers.ceilings + place, ceiling, mask=present)
        tl.store(buffers.promises + place, promise.to(tl.float32), mask=present)


@triton.jit
def ordered(values, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Integers that order as fp32 ``values`` [SIZE] do, ties to the lower place: no two alike."""
    bits = values.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * SIZE
    return key + (SIZE - 1 - tl.arange(0, SIZE))


@triton.jit
def best_places(values, wanted, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the ``wanted`` largest of fp32 ``values`` [SIZE] stand, ties to the lower place.

    A few are found one after the other, more by looking for a bound in quarters of what is left.
    """
    key = ordered(values, SIZE)
    low = tl.min(key, 0)
    high = tl.max(key, 0)
    if wanted <= C_FEW:
        for _ in range(1, wanted):
            high = tl.max(tl.where(key < high, key, low), 0)
        low = high
    while low < high:
        step = ((high - low) >> 2) + 1
        first = low + step
        second = first + step
        third = second + step
        # Three counts in one sum: none is above 2**20.
        counts = (key >= first).to(tl.int64) + ((key >= second).to(tl.int64) << 20)
        counts = tl.sum(counts + ((key >= third).to(tl.int64) << 40), 0)
        above_first = counts & 0xFFFFF
        above_second = (counts >> 20) & 0xFFFFF
        above_third = counts >> 40
        if above_third >= wanted:
            low = third
        elif above_second >= wanted:
            low = second
            high = third - 1
        elif above_first >= wanted:
            low = first
            high = second - 1
        else:
            high = first - 1
    return key >= low


@triton.jit
def leaders_kernel(  # type: ignore[no-untyped-def]
    screened,
    questions,
    draws,
    buffers,
    largest,
    BLOCKS: tl.constexpr,
    LEADERS: tl.constexpr,
    OWNED: tl.constexpr,
):
    """The best estimates of the best blocks (the k best tokens lie in the k best blocks), sorted by
    id, and the largest upper bound of all."""
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(questions.integers + row * C_INTEGERS)
    if kind >= 0:
        k = tl.load(questions.integers + row * C_INTEGERS + 1)
        wanted = tl.minimum(tl.where(kind == C_TOP_K, k, C_FEW), LEADERS).to(tl.int32)
        block = tl.arange(0, BLOCKS)
        inside, own = block < draws.blocks, row * draws.blocks + block
        tl.store(
            largest + row, tl.max(tl.load(buffers.tops + own, mask=inside, other=float("-inf")), 0)
        )
        promise = tl.load(buffers.promises + own, mask=inside, other=float("-inf"))
        kept = best_places(promise, wanted, BLOCKS) & (promise > float("-inf"))
        rank = tl.cumsum(kept.to(tl.int32), 0) - 1
        chosen, leaders = buffers.chosen + row * LEADERS, buffers.leaders + row * LEADERS
        tl.store(chosen + rank, block, mask=kept)
        count = tl.sum(kept.to(tl.int32), 0)
        # What some threads of this program have chosen, others read.
        tl.debug_barrier()
        place = tl.arange(0, LEADERS * C_BLOCK)
        present = place // C_BLOCK < count
        block = tl.load(chosen + place // C_BLOCK, mask=present, other=0)
        ids = block * C_BLOCK + place % C_BLOCK
        inside = present & (ids < screened.size)
        values = screened.estimates + row * screened.width
        value = tl.load(values + ids, mask=inside, other=float("-inf"))
        score = value
        if kind == C_GUMBEL:
            scaled = value.to(tl.float64) * scale_of(questions, row)
            score = (scaled + noise_of(questions, row, ids, draws, OWNED)).to(tl.float32)
        kept = best_places(score, wanted, LEADERS * C_BLOCK) & (score > float("-inf"))
        rank = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(leaders + rank, ids, mask=kept)
        tl.store(buffers.leader_counts + row, tl.sum(kept.to(tl.int32), 0))
    else:
        tl.store(buffers.leader_counts + row, 0)


@triton.jit
def scores_kernel(  # type: ignore[no-untyped-def]
    products,
    questions,
    draws,
    buffers,
    bias,
    constants,
    support,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OWNED: tl.constexpr,
    LEADERS: tl.constexpr,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """From the leaders' canonical products scores that they certainly reach."""
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(buffers.leader_counts + row)
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < count:
        inside = place < count
        ids = tl.load(buffers.leaders + row * LEADERS + place, mask=inside, other=0)
        logit = row_dots(products, row, ids.to(tl.int64), inside, TOKENS, UNROLL)
        # The host's hyperbolic tangent may be a little lower.
        logit = finished(
            logit, ids, inside, bias, constants, C_EXACT_SOFTCAP_ERROR, BIAS, SCALE, SOFTCAP
        )
        logit = adjusted_by(logit, row, ids, inside, support)
        score = logit.to(tl.float64) * scale_of(questions, row)
        if tl.load(questions.integers + row * C_INTEGERS) == C_GUMBEL:
            score += noise_of(questions, row, ids, draws, OWNED) - C_NOISE_ROUNDING
        tl.store(buffers.leader_scores + row * LEADERS + place, score, mask=inside)
