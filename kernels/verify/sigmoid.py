"""A draft tested with sigmoids in numba: two logits, then one row of each model.

What is left of a weight where another is taken off is so small, with limits far apart, that the
weight alone bounds it badly: nearly every block of the vocabulary could hold the winner. But a
sigmoid rises by at most a quarter of what its argument does, and so does the difference of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from lexshard.kernels.rounding import NOISE_ROUNDING

# Of the rounding of two sigmoids, which alone can make a difference of them.
SIGMOID_ERROR = 1e-15


class SigmoidRow(NamedTuple):
    """Logits and their inverse temperature."""

    logits: npt.NDArray[np.float32]  # [V]
    scale: float


@njit(nogil=True, cache=True)
def _argument(row, token, limits):  # type: ignore[no-untyped-def]
    return (np.float64(row.logits[token]) * row.scale - limits[0]) / (limits[1] - limits[0])


@njit(nogil=True, cache=True)
def _sigmoid(z):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + math.exp(-z))


@njit(nogil=True, cache=True)
def _log(weight):  # type: ignore[no-untyped-def]
    return math.log(weight) if weight > 0.0 else -np.inf


@njit(nogil=True, cache=True)
def _block_bounds(p, q, limits, residual, key, position, bounds):  # type: ignore[no-untyped-def]
    """Writes a bound on the scores of every block."""
    for block in range(bounds.size):
        highest, rise = -np.inf, 0.0
        for token in range(block * BLOCK, min(block * BLOCK + BLOCK, p.logits.size)):
            z = _argument(p, token, limits)
            highest = max(highest, z)
            if residual:
                rise = max(rise, z - _argument(q, token, limits))
        left = _sigmoid(highest)
        if residual:
            left = min(left, 0.25 * rise)
        uniform, _ = block_draw(key, position, np.uint64(block))
        bounds[block] = math.log(left + SIGMOID_ERROR) + noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def _race(p, q, limits, residual, key, position, bounds):  # type: ignore[no-untyped-def]
    """The token of the largest ``log max(0, p - q)`` plus noise, without ``q`` if not
    ``residual``; -1 where there is none. Equal scores go to the lower token."""
    _block_bounds(p, q, limits, residual, key, position, bounds)
    likely = np.argmax(bounds)
    token, best = np.int64(-1), -np.inf
    for step in range(-1, bounds.size):
        # The likeliest block sets a high mark, below which most blocks need no visit.
        block = likely if step < 0 else step
        if step == likely or bounds[block] < best:
            continue
        uniform, winner = block_draw(key, position, np.uint64(block))
        smallest = block_minimum(uniform)
        largest_noise = NOISE_ROUNDING - math.log(smallest)
        for candidate in range(block * BLOCK, min(block * BLOCK + BLOCK, p.logits.size)):
            left = _sigmoid(_argument(p, candidate, limits))
            if residual:
                left -= _sigmoid(_argument(q, candidate, limits))
            score = _log(left)
            if left <= 0.0 or score + largest_noise < best:
                continue
            score += np.float64(token_noise(key, position, candidate, smallest, winner))
            if score > best or (score == best and candidate < token):
                token, best = np.int64(candidate), score
    return token


@njit(nogil=True, cache=True)
def emitted_by_sigmoid(p, q, limits, token, log_uniform, key, position, bounds):  # type: ignore[no-untyped-def]
    """The token that the row of a draft emits, and how many logits were read. ``key`` is that of
    the residual's noise; ``bounds`` [ceil(V / 64)] float64 is scratch."""
    log_p = _log(_sigmoid(_argument(p, token, limits)))
    if log_uniform < log_p - _log(_sigmoid(_argument(q, token, limits))):
        return token, 2
    drawn = _race(p, q, limits, np.bool_(True), key, position, bounds)
    if drawn < 0:
        drawn = _race(p, q, limits, np.bool_(False), key, position, bounds)
    return drawn, 2 * p.logits.size
