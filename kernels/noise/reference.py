"""The draw, stated plainly.

Token ``i`` belongs to block ``b = i // 64`` at offset ``o = i % 64``; blocks always have 64 ids,
those beyond the vocabulary are phantoms. Philox 4x32-10 has the key words ``(key & 0xffffffff,
key >> 32)`` and the counter words ``(position, b, lane, 0)``; its output words are ``x0 .. x3``.

- Lane 0 gives the block's uniform ``U_b = (2 m + 1) / 2**53`` with the 52 bits ``m = x0 * 2**20 +
  x1 // 2**12`` (never 0 or 1, and ``1 - U_b`` is exact), and the winning offset ``o* = x2 & 63``.
- ``a_b = -log(1 - U_b) / 64`` is the smallest of 64 unit exponentials.
- Lane ``1 + o // 4``, word ``o % 4`` gives the token's uniform ``U = (word + 1/2) / 2**32``.
- The token's exponential is ``t = a_b`` if ``o == o*`` and ``a_b - log(1 - U)`` otherwise: given
  the minimum and its place, the others are the minimum plus fresh unit exponentials.
- ``g = fp32(-log t)``. Everything before the last rounding is float64.

Lane 17 of block 0 belongs to `kernels.verify`, which says what it draws there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import BLOCK

Words = npt.NDArray[np.uint64]
FourWords = tuple[Words, Words, Words, Words]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
OFFSET_MASK = np.uint64(BLOCK - 1)


def philox(counter: FourWords, key: int) -> FourWords:
    """Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""
    x0, x1, x2, x3 = counter
    k0, k1 = np.uint64(key) & LOW, np.uint64(key) >> HALF
    for _ in range(10):
        first, second = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (second >> HALF) ^ x1 ^ k0,
            second & LOW,
            (first >> HALF) ^ x3 ^ k1,
            first & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return x0, x1, x2, x3


def _blocks(key: int, position: int, blocks: Words) -> tuple[npt.NDArray[np.float64], Words]:
    zero = np.zeros_like(blocks)
    x0, x1, x2, _ = philox((zero + np.uint64(position), blocks, zero, zero), key)
    mantissa = (x0 << np.uint64(20)) | (x1 >> np.uint64(12))
    uniform = (2.0 * mantissa.astype(np.float64) + 1.0) * 2.0**-53
    return -np.log(1.0 - uniform) / BLOCK, x2 & OFFSET_MASK


def gumbel_noise(key: int, position: int, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    tokens = ids.astype(np.uint64)
    blocks, offsets = tokens // np.uint64(BLOCK), tokens & OFFSET_MASK
    smallest, winner = _blocks(key, position, blocks)
    zero = np.zeros_like(blocks)
    lane = np.uint64(1) + (offsets >> np.uint64(2))
    words = np.stack(philox((zero + np.uint64(position), blocks, lane, zero), key))
    word = np.take_along_axis(words, (offsets & np.uint64(3)).astype(np.int64)[None], axis=0)[0]
    uniform = (word.astype(np.float64) + 0.5) * 2.0**-32
    exponential = np.where(offsets == winner, smallest, smallest - np.log(1.0 - uniform))
    return (-np.log(exponential)).astype(np.float32)


def gumbel_row(key: int, position: int, vocabulary_size: int) -> npt.NDArray[np.float32]:
    return gumbel_noise(key, position, np.arange(vocabulary_size))
