"""The draw in numba. The scalar functions are what the search and draw kernels call."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.noise.reference import HALF, LOW
from lexshard.kernels.rounding import NOISE_ROUNDING

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
ZERO, ONE, TWO, THREE = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
SIX, TWELVE, TWENTY, OFFSET_MASK = np.uint64(6), np.uint64(12), np.uint64(20), np.uint64(BLOCK - 1)
LOG_BLOCK = math.log(BLOCK)
LOG_2 = math.log(2.0)


@njit(nogil=True, cache=True, inline="always")
def philox(position, block, lane, key):  # type: ignore[no-untyped-def]
    """Philox 4x32-10 of the counter (position, block, lane, 0); every argument is uint64."""
    x0, x1, x2, x3 = position, block, lane, ZERO
    k0, k1 = key & LOW, key >> HALF
    for _ in range(10):
        first = M0 * x0
        second = M1 * x2
        x0 = (second >> HALF) ^ x1 ^ k0
        x2 = (first >> HALF) ^ x3 ^ k1
        x1 = second & LOW
        x3 = first & LOW
        k0 = (k0 + W0) & LOW
        k1 = (k1 + W1) & LOW
    return x0, x1, x2, x3


@njit(nogil=True, cache=True, inline="always")
def block_draw(key, position, block):  # type: ignore[no-untyped-def]
    """(U_b, winning offset) of a block; arguments are uint64."""
    x0, x1, x2, _ = philox(position, block, ZERO, key)
    mantissa = (x0 << TWENTY) | (x1 >> TWELVE)
    return (2.0 * np.float64(mantissa) + 1.0) * 2.0**-53, x2 & OFFSET_MASK


@njit(nogil=True, cache=True, inline="always")
def block_minimum(uniform):  # type: ignore[no-untyped-def]
    return -math.log(1.0 - uniform) / BLOCK


@njit(nogil=True, cache=True, inline="always")
def noise_ceiling(uniform):  # type: ignore[no-untyped-def]
    """A bound on every noise of the block, without a logarithm.

    ``a_b >= U_b / 64``, and ``log2 U >= e + f - 1`` for ``U = 2**e f`` with ``1 <= f < 2``; the
    last term is far above every rounding in between.
    """
    bits = np.float64(uniform).view(np.int64)
    log2_below = np.float64(bits) * 2.0**-52 - 1023.0
    return LOG_BLOCK - LOG_2 * log2_below + NOISE_ROUNDING


@njit(nogil=True, cache=True, inline="always")
def _fresh_uniform(key, position, token):  # type: ignore[no-untyped-def]
    """That of a token which does not win its block, in the interior of 0 to 1."""
    offset = np.uint64(token) & OFFSET_MASK
    x0, x1, x2, x3 = philox(position, np.uint64(token) >> SIX, ONE + (offset >> TWO), key)
    word = x0
    part = offset & THREE
    if part == ONE:
        word = x1
    elif part == TWO:
        word = x2
    elif part == THREE:
        word = x3
    return (np.float64(word) + 0.5) * 2.0**-32


@njit(nogil=True, cache=True, inline="always")
def fresh_ceiling(key, position, token, smallest, winner):  # type: ignore[no-untyped-def]
    """A bound on `token_noise` without its logarithms: ``-ln (1 - U) >= U``."""
    if np.uint64(token) & OFFSET_MASK == winner:
        return np.inf
    return noise_ceiling((smallest + _fresh_uniform(key, position, token)) * BLOCK)


@njit(nogil=True, cache=True, inline="always")
def token_noise(key, position, token, smallest, winner):  # type: ignore[no-untyped-def]
    """The fp32 noise of one token, given its block's minimum and winning offset."""
    if np.uint64(token) & OFFSET_MASK == winner:
        return np.float32(-math.log(smallest))
    uniform = _fresh_uniform(key, position, token)
    return np.float32(-math.log(smallest - math.log(1.0 - uniform)))


@njit(nogil=True, cache=True, inline="always")
def noise_of(key, position, token):  # type: ignore[no-untyped-def]
    """The fp32 noise of one token."""
    uniform, winner = block_draw(key, position, np.uint64(token) >> SIX)
    return token_noise(key, position, token, block_minimum(uniform), winner)


@njit(nogil=True, cache=True)
def _noise(key, position, ids):  # type: ignore[no-untyped-def]
    result = np.empty(ids.size, np.float32)
    for index in range(ids.size):
        result[index] = noise_of(key, position, ids[index])
    return result


@njit(nogil=True, cache=True)
def _row(key, position, vocabulary_size):  # type: ignore[no-untyped-def]
    result = np.empty((vocabulary_size + BLOCK - 1) // BLOCK * BLOCK, np.float32)
    for block in range(result.size // BLOCK):
        uniform, winner = block_draw(key, position, np.uint64(block))
        smallest = block_minimum(uniform)
        start = block * BLOCK
        for lane in range(16):
            words = philox(position, np.uint64(block), np.uint64(lane + 1), key)
            for part in range(4):
                fresh = (np.float64(words[part]) + 0.5) * 2.0**-32
                exponential = smallest - math.log(1.0 - fresh)
                result[start + lane * 4 + part] = np.float32(-math.log(exponential))
        result[start + np.int64(winner)] = np.float32(-math.log(smallest))
    return result[:vocabulary_size]


def gumbel_noise(key: int, position: int, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    flat = _noise(np.uint64(key), np.uint64(position), ids.astype(np.int64).ravel())
    return flat.reshape(ids.shape)


def gumbel_row(key: int, position: int, vocabulary_size: int) -> npt.NDArray[np.float32]:
    return _row(np.uint64(key), np.uint64(position), vocabulary_size)
