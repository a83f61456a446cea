"""Where a key and a value lie in the blocks of a CPU's cache: as float32, or rounded to bfloat16.

Words hold two bfloat16: neighbouring places of a key, and a place of two neighbouring tokens'
values. The first of two tokens clears the second's half, so that what an earlier owner left there
is never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import overload

from lexshard.kernels.linear.operand import pair_up, rounded_bits

Array = npt.NDArray[Any]

_HALF = np.uint32(16)
_LOWER = np.uint32(0x0000FFFF)


def put(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    block: int,
    head: int,
    offset: int,
) -> None:
    """``key, value [D]`` float32 into ``key_cache [blocks, Hkv, D or D / 2, 16]`` and ``value_cache
    [blocks, Hkv, 16 or 8, D]``. For compiled functions."""
    raise NotImplementedError("only compiled functions call this: write_cache is for others")


@overload(put)
def _put(
    key: Any, value: Any, key_cache: Any, value_cache: Any, block: Any, head: Any, offset: Any
) -> Any:
    def as_they_are(
        key: Any, value: Any, key_cache: Any, value_cache: Any, block: Any, head: Any, offset: Any
    ) -> None:
        for j in range(key.shape[0]):
            key_cache[block, head, j, offset] = key[j]
        for j in range(value.shape[0]):
            value_cache[block, head, offset, j] = value[j]

    def rounded(
        key: Any, value: Any, key_cache: Any, value_cache: Any, block: Any, head: Any, offset: Any
    ) -> None:
        pair_up(key.view(np.uint32), key_cache[block, head, :, offset])
        put_half(value.view(np.uint32), value_cache[block, head, offset // 2], offset % 2)

    return rounded if key_cache.dtype == types.uint32 else as_they_are


@njit(nogil=True, cache=True)
def put_half(bits: Array, words: Array, place: int) -> None:
    """``bits [D]`` of float32 into a half of ``words [D]``: the first token's, or the second's."""
    for j in range(words.shape[0]):
        rounded = rounded_bits(bits[j])
        if place == 0:
            words[j] = np.uint32(rounded >> _HALF)
        else:
            words[j] = np.uint32(rounded | np.uint32(words[j] & _LOWER))
