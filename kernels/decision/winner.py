"""The one best token of a row: by adjusted logit, or by logit over temperature plus noise."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.decision.maxima import greater, largest_rank, rank
from lexshard.kernels.decision.row_search import ALL, LOWEST, least_logit, reaching, visit
from lexshard.kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from lexshard.kernels.rounding import NOISE_ROUNDING

MAGNITUDE_64 = 0x7FFFFFFFFFFFFFFF


@njit(nogil=True, cache=True)
def _place_of(values, value):  # type: ignore[no-untyped-def]
    place = 0
    while values[place] != value:
        place += 1
    return place


@njit(nogil=True, cache=True)
def _best_of_block(search, a, blocks, index, ids, values, token, best):  # type: ignore[no-untyped-def]
    """The better of (token, best) and the tokens of the block ``blocks[index]``."""
    count = visit(search, a, blocks[index:], 1, ALL, best, ids, values)
    for place in range(count):
        # Nothing excluded is here: the first mark is the lowest logit there is.
        candidate = np.int64(ids[place])
        if values[place] > best or token < 0 or candidate < token:
            best = values[place]
            token = candidate
    return token, best


@njit(nogil=True, cache=True)
def best_token(search, a):  # type: ignore[no-untyped-def]
    """The token with the largest adjusted logit and that logit; -1 where all are excluded."""
    ceilings = search.ceilings
    token, best = -1, LOWEST
    highest = np.int32(rank(largest_rank(ceilings.view(np.int32)))).view(np.float32)
    if highest < LOWEST:
        return token, best
    ids, values = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.float32)
    blocks = np.empty(ceilings.size, np.int64)
    # The likeliest block sets a high mark, which most of the others cannot reach.
    likely = blocks[0] = _place_of(ceilings, highest)
    token, best = _best_of_block(search, a, blocks, 0, ids, values, token, best)
    for index in range(reaching(ceilings, best, blocks)):
        block = blocks[index]
        if ceilings[block] >= best and block != likely:
            token, best = _best_of_block(search, a, blocks, index, ids, values, token, best)
    return token, best


@njit(nogil=True, cache=True)
def _bounds(ceilings, key, position, scale, bounds):  # type: ignore[no-untyped-def]
    for block in range(ceilings.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        bounds[block] = np.float64(ceilings[block]) * scale + noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def _largest_bound(bounds):  # type: ignore[no-untyped-def]
    """As `largest_rank` does it, for float64."""
    bits = bounds.view(np.int64)
    highest = bits[0] ^ ((bits[0] >> 63) & MAGNITUDE_64)
    for block in range(bits.size):
        highest = max(highest, bits[block] ^ ((bits[block] >> 63) & MAGNITUDE_64))
    return np.int64(highest ^ ((highest >> 63) & MAGNITUDE_64)).view(np.float64)


@njit(nogil=True, cache=True)
def _draw_block(  # type: ignore[no-untyped-def]
    search, a, blocks, index, key, position, scale, least, last, ids, values, token, best
):
    """The better of (token, best) and the scores of the tokens of the block ``blocks[index]``."""
    block = blocks[index]
    uniform, winner = block_draw(key, position, np.uint64(block))
    smallest = block_minimum(uniform)
    highest_noise = -math.log(smallest) + NOISE_ROUNDING
    level = greater(least_logit(best - highest_noise, scale), least)
    count = visit(search, a, blocks[index:], 1, ALL, level, ids, values)
    for place in range(count):
        candidate, scaled = np.int64(ids[place]), np.float64(values[place]) * scale
        kept = values[place] > least or candidate <= last
        if kept and scaled + highest_noise >= best:
            noise = token_noise(key, position, candidate, smallest, winner)
            score = scaled + np.float64(noise)
            if score > best or (score == best and candidate < token):
                best = score
                token = candidate
    return token, best


@njit(nogil=True, cache=True)
def draw_token(search, a, key, position, scale, least, last):  # type: ignore[no-untyped-def]
    """The token with the largest ``l scale + noise``, -1 where all are excluded.

    Only tokens above the logit ``least`` count, and those that equal it up to the id ``last``.
    """
    ceilings = search.ceilings
    token, best = np.int64(-1), -np.inf
    bounds = np.empty(ceilings.size, np.float64)
    _bounds(ceilings, key, position, scale, bounds)
    highest = _largest_bound(bounds)
    if highest == -np.inf:
        return token
    ids, values = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.float32)
    blocks = np.empty(bounds.size, np.int64)
    likely = blocks[0] = _place_of(bounds, highest)
    token, best = _draw_block(
        search, a, blocks, 0, key, position, scale, least, last, ids, values, token, best
    )
    for index in range(reaching(bounds, best, blocks)):
        block = blocks[index]
        if bounds[block] >= best and block != likely and ceilings[block] >= least:
            token, best = _draw_block(
                search,
                a,
                blocks,
                index,
                key,
                position,
                scale,
                least,
                last,
                ids,
                values,
                token,
                best,
            )
    return token
