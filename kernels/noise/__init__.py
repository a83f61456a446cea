"""The one random draw of the system: Gumbel noise that depends on (key, position, token id) alone.

Every path that samples (certified, dense, drafting, edge; any shard, any batch) reads its noise
here, so that the same seed gives the same token everywhere. `reference.py` states the mathematics.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise import cpu


def gumbel_noise(key: int, position: int, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of the given token ids, fp32, any order, repeats allowed.

    ``key`` is a 64-bit unsigned integer, ``position`` the index of the token being drawn in
    prompt + output. Raises `ValueError` where key, position or an id is out of range (64 unsigned
    bits, 32 unsigned bits, not negative).
    """
    _check(key, position)
    array = np.asarray(ids)
    if array.size and int(array.min()) < 0:
        raise ValueError("token ids must not be negative")
    return cpu.gumbel_noise(key, position, array)


def gumbel_row(key: int, position: int, vocabulary_size: int) -> npt.NDArray[np.float32]:
    """`gumbel_noise` of the ids 0 .. vocabulary_size - 1, one philox pass per block of 64."""
    _check(key, position)
    return cpu.gumbel_row(key, position, vocabulary_size)


def _check(key: int, position: int) -> None:
    if not 0 <= key < 2**64:
        raise ValueError(f"key {key} is not a 64-bit unsigned integer")
    if not 0 <= position < 2**32:
        raise ValueError(f"position {position} is not a 32-bit unsigned integer")
