"""What the rows of a search draw, found where their candidates are.

The host decides, in the arithmetic that every process shares. This is a guess at what it will
decide, from which the next step can begin before: logarithms and exponentials may differ in their
last bits, and so, very rarely, may the token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.noise.triton_kernel import gumbel_of
from lexshard.kernels.search.gpu.triton_adjust import adjusted_by, finished
from lexshard.kernels.search.gpu.triton_bounds import (
    C_GREEDY,
    C_GUMBEL,
    C_INTEGERS,
    C_NOISE_ROUNDING,
    C_REALS,
    C_TOP_K,
)
from lexshard.kernels.search.gpu.triton_leaders import best_places, ordered

# In caps, more than a soft-cap may differ between a device and a host.
_CAP_ROUNDING = tl.constexpr(2.0**-21)


@triton.jit
def _nucleus(value, scale, kept, share, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the ``kept`` the fewest best, ties to the lower place, that hold ``share`` of the mass."""
    best = tl.max(tl.where(kept, value, float("-inf")), 0)
    mass = tl.where(kept, tl.exp((value - best).to(tl.float64) * scale), 0.0)
    target = tl.sum(mass, 0) * share
    key = ordered(value, SIZE)
    low = tl.min(key, 0)
    high = tl.max(key, 0)
    while low < high:
        middle = high - ((high - low) >> 1)
        if tl.sum(tl.where(key >= middle, mass, 0.0), 0) >= target:
            low = middle
        else:
            high = middle - 1
    return kept & (key >= low)


@triton.jit
def draw_kernel(  # type: ignore[no-untyped-def]
    questions,
    token_ids,
    results,
    bias,
    constants,
    support,
    levels,
    capacity,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OWNED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The row that each row draws from its candidates, -1 where there was no room for these.

    Its logit is the row's level, or -inf where a host may draw another.
    """
    row = tl.program_id(0).to(tl.int64)
    kind = tl.load(questions.integers + row * C_INTEGERS)
    count = tl.load(results.counts + row)
    drawn = -1
    level = float("-inf")
    if (kind >= 0) & (count <= capacity) & (count > 0):
        place = tl.arange(0, SIZE)
        inside = place < count
        ids = tl.load(results.candidates + row * capacity + place, mask=inside, other=0)
        value = tl.load(results.logits + row * capacity + place, mask=inside, other=0.0)
        value = finished(value, ids, inside, bias, constants, 0.0, BIAS, SCALE, SOFTCAP)
        value = adjusted_by(value, row, ids, inside, support)
        value = tl.where(inside, value, float("-inf"))
        kept = value > float("-inf")
        asked = questions.reals + row * C_REALS
        scale = tl.load(asked)
        if (kind != C_GREEDY) & (kind != C_GUMBEL):
            scaled = value.to(tl.float64) * scale
            kept = kept & (scaled >= tl.max(scaled, 0) + tl.load(asked + 5))
            if kind == C_TOP_K:
                k = tl.load(questions.integers + row * C_INTEGERS + 1).to(tl.int32)
                kept = kept & best_places(value, tl.minimum(k, SIZE), SIZE)
            share = tl.load(asked + 4)
            if share < 1.0:
                kept = _nucleus(value, scale, kept, share, SIZE)
        score = tl.where(kept, value, float("-inf")).to(tl.float64)
        if kind != C_GREEDY:
            tokens = ids
            if OWNED > 0:
                tokens = tl.load(token_ids + ids, mask=inside, other=0)
            word = questions.integers + row * C_INTEGERS
            noise = gumbel_of(tokens, tl.load(word + 2), tl.load(word + 3), tl.load(word + 4))
            score = score * scale + noise.to(tl.float64)
        best = tl.max(score, 0)
        winner = tl.min(tl.where(kept & (score == best), place, SIZE), 0)
        if winner < SIZE:
            drawn = tl.load(results.candidates + row * capacity + winner)
        doubt = 2.0 * C_NOISE_ROUNDING
        if SOFTCAP:
            doubt += tl.load(constants + 3) * scale * _CAP_ROUNDING
        near = kept & (score >= best - doubt)
        highest = tl.max(tl.where(near, value, float("-inf")), 0)
        if tl.sum(near.to(tl.int32), 0) == 1:
            level = highest
    tl.store(results.drawn + row, drawn)
    tl.store(levels + row, level)
