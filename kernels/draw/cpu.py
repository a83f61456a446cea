"""The decision in numba: the whole batch in one call, noise only where it can still win."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.rounding import NOISE_ROUNDING
from lexshard.kernels.truncate.cpu import truncate_row


@njit(nogil=True, cache=True)
def _greedy(ids, logits):  # type: ignore[no-untyped-def]
    token = -1
    highest = MINUS_INFINITY
    for index in range(ids.size):
        if logits[index] > highest:
            highest = logits[index]
            token = np.int64(ids[index])
    return token


@njit(nogil=True, cache=True)
def _visit(  # type: ignore[no-untyped-def]
    ids, logits, keep, start, stop, key, position, scale, token, best
):
    """The better of (token, best) and the candidates ``start:stop``, which share a block."""
    highest = MINUS_INFINITY
    for index in range(start, stop):
        if keep[index]:
            highest = max(highest, logits[index])
    uniform, winner = block_draw(key, position, np.uint64(ids[start] // BLOCK))
    ceiling = np.float64(highest) * scale
    if highest == MINUS_INFINITY or ceiling + noise_ceiling(uniform) < best:
        return token, best
    smallest = block_minimum(uniform)
    highest_noise = -math.log(smallest) + NOISE_ROUNDING
    for index in range(start, stop):
        scaled = np.float64(logits[index]) * scale
        if keep[index] and scaled + highest_noise >= best:
            noise = token_noise(key, position, ids[index], smallest, winner)
            score = scaled + np.float64(noise)
            candidate = np.int64(ids[index])
            if score > best or (score == best and candidate < token):
                best = score
                token = candidate
    return token, best


@njit(nogil=True, cache=True)
def _draw_kept(ids, logits, keep, key, position, scale):  # type: ignore[no-untyped-def]
    """The kept token with the largest score; some token is kept."""
    likely = -1
    for index in range(ids.size):
        if keep[index] and (likely < 0 or logits[index] > logits[likely]):
            likely = index
    token = np.int64(ids[likely])
    best = -np.inf
    # The likeliest token sets a high mark, below which most blocks need no noise.
    token, best = _visit(ids, logits, keep, likely, likely + 1, key, position, scale, token, best)
    start = 0
    while start < ids.size:
        block_end = (ids[start] // BLOCK + 1) * BLOCK
        stop = start + 1
        while stop < ids.size and ids[stop] < block_end:
            stop += 1
        token, best = _visit(ids, logits, keep, start, stop, key, position, scale, token, best)
        start = stop
    return token


@njit(nogil=True, cache=True)
def draw_row(ids, logits, controls, row):  # type: ignore[no-untyped-def]
    """The token of one row's candidates, -1 where all are excluded."""
    scale = controls.inverse_temperature[row]
    if scale == 0.0:
        return _greedy(ids, logits)
    keep = np.empty(ids.size, np.bool_)
    top_k, top_p = controls.top_k[row], controls.top_p[row]
    if not truncate_row(logits, scale, top_k, top_p, controls.log_min_p[row], keep):
        return -1
    return _draw_kept(ids, logits, keep, controls.key[row], controls.position[row], scale)


@njit(nogil=True, cache=True)
def draw(ids, logits, offsets, controls):  # type: ignore[no-untyped-def]
    """See `kernels.draw.draw`."""
    rows = offsets.size - 1
    tokens = np.empty(rows, np.int64)
    for row in range(rows):
        own = slice(offsets[row], offsets[row + 1])
        tokens[row] = draw_row(ids[own], logits[own], controls, row)
    return tokens
