"""A row's token in Triton: the largest score plus noise, opening only blocks that can still win."""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.noise.triton_kernel import block_draw, gumbel_of
from lexshard.kernels.rounding import NOISE_ROUNDING
from lexshard.kernels.verify.race import CERTAIN, DENSE, NOWHERE, SPARSE

_NOWHERE, _CERTAIN = tl.constexpr(NOWHERE), tl.constexpr(CERTAIN)
_SPARSE, _DENSE = tl.constexpr(SPARSE), tl.constexpr(DENSE)
_BLOCK = tl.constexpr(BLOCK)
_ROUNDING = tl.constexpr(NOISE_ROUNDING)
_NO_TOKEN = tl.constexpr(2147483647)
_NO_SCORE = tl.constexpr(-1.7e308)  # below any score


@triton.jit
def scaled_logits(logits, tokens, inside, scale):  # type: ignore[no-untyped-def]
    return tl.load(logits + tokens, mask=inside, other=float("-inf")).to(tl.float64) * scale


@triton.jit
def distance(scaled, top):  # type: ignore[no-untyped-def]
    """``scaled - top``, 0 where both are infinite."""
    return tl.where(scaled == top, 0.0, scaled - top)


@triton.jit
def sparse_probabilities(ids, probabilities, first, stop, tokens, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sparse probabilities [COUNT] of ``tokens`` [COUNT]."""
    found = tl.zeros((COUNT,), tl.float64)
    for start in range(first, stop, 32):
        place = start + tl.arange(0, 32)
        some = tl.load(ids + place, mask=place < stop, other=-1)
        weight = tl.load(probabilities + place, mask=place < stop, other=0.0)
        found += tl.sum(tl.where(some[None, :] == tokens[:, None], weight[None, :], 0.0), 1)
    return found


@triton.jit
def greedy_token(logits, maxima, size, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token of the largest logit, the lowest of equals; -1 where all are excluded."""
    block = tl.arange(0, BLOCKS)
    highest_of = tl.load(
        maxima + block, mask=block < blocks, other=float("-inf"), cache_modifier=".cg"
    )
    highest = tl.max(highest_of)
    own = tl.min(tl.where(highest_of == highest, block, BLOCKS))
    tokens = own * _BLOCK + tl.arange(0, _BLOCK)
    values = tl.load(logits + tokens, mask=tokens < size, other=float("-inf"))
    token = tl.min(tl.where(values == highest, tokens, _NO_TOKEN))
    return tl.where(highest > float("-inf"), token, -1)


@triton.jit
def race(  # type: ignore[no-untyped-def]
    logits,
    maxima,
    size,
    blocks,
    scale,
    key_low,
    key_high,
    position,
    residual,
    top,
    log_total,
    draft,
    dense,
    dense_scale,
    dense_top,
    dense_log_total,
    ids,
    probabilities,
    first,
    stop,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token of the largest score plus noise; -1 where there is none. A score is ``l scale``, or
    (``residual``) the log of ``max(0, p - q)``, which is never above that of ``p``. Where rounding
    has left nothing of the residual, a second round goes by ``p`` alone."""
    block = tl.arange(0, BLOCKS)
    bounds = tl.load(maxima + block, mask=block < blocks, other=float("-inf"), cache_modifier=".cg")
    bounds = bounds.to(tl.float64) * scale
    smallest, _ = block_draw(block.to(tl.uint32), key_low, key_high, position)
    excluded = bounds == float("-inf")
    if KIND != _NOWHERE:
        bounds = tl.where(residual, distance(bounds, top) - log_total, bounds)
    bounds = tl.where(excluded, float("-inf"), bounds - tl.log(smallest) + _ROUNDING)
    best = tl.full((), _NO_SCORE, tl.float64)
    token = tl.full((), _NO_TOKEN, tl.int32)
    for attempt in range(2):
        ceilings = tl.where(token == _NO_TOKEN, bounds, float("-inf"))
        highest = tl.max(ceilings)
        while highest >= best:
            own = tl.min(tl.where(ceilings == highest, block, BLOCKS))
            tokens = own * _BLOCK + tl.arange(0, _BLOCK)
            scores = scaled_logits(logits, tokens, tokens < size, scale)
            if KIND != _NOWHERE:
                present = scores > float("-inf")
                left = tl.where(present, tl.exp(distance(scores, top) - log_total), 0.0)
                if KIND == _CERTAIN:
                    q = tl.where(tokens == draft, 1.0, 0.0)
                if KIND == _SPARSE:
                    q = sparse_probabilities(ids, probabilities, first, stop, tokens, _BLOCK)
                if KIND == _DENSE:
                    proposed = scaled_logits(dense, tokens, tokens < size, dense_scale)
                    q = tl.exp(distance(proposed, dense_top) - dense_log_total)
                    q = tl.where(proposed > float("-inf"), q, 0.0)
                left -= tl.where(attempt == 0, q, 0.0)
                log_left = tl.log(tl.where(left > 0.0, left, 1.0))
                log_left = tl.where(left > 0.0, log_left, float("-inf"))
                scores = tl.where(residual, log_left, scores)
            scores += gumbel_of(tokens, key_low, key_high, position).to(tl.float64)
            score = tl.max(scores)
            candidate = tl.min(tl.where(scores == score, tokens, _NO_TOKEN))
            better = (score > best) | ((score == best) & (candidate < token))
            best = tl.where(better, score, best)
            token = tl.where(better, candidate, token)
            ceilings = tl.where(block == own, float("-inf"), ceilings)
            highest = tl.max(ceilings)
    return tl.where(token == _NO_TOKEN, -1, token)
