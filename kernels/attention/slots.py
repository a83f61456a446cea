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

from lexshard.kernels.linear.operand import rounded_bits

Array = npt.NDArray[Any]

_HALF = np.uint32(16)
_LOWER = np.uint32(0x0000FFFF)


def put_key(key: Array, cache: Array, block: int, head: int, offset: int) -> None:
    """``key [D]`` float32 into ``cache [blocks, Hkv, D or D / 2, 16]``. For compiled functions."""
    raise NotImplementedError("only compiled functions call this")


@overload(put_key)
def _put_key(key: Any, cache: Any, block: Any, head: Any, offset: Any) -> Any:
    def as_it_is(key: Any, cache: Any, block: Any, head: Any, offset: Any) -> None:
        for j in range(key.shape[0]):
            cache[block, head, j, offset] = key[j]

    def rounded(key: Any, cache: Any, block: Any, head: Any, offset: Any) -> None:
        put_rounded_key(key.view(np.uint32), cache[block, head], offset)

    return rounded if cache.dtype == types.uint32 else as_it_is


def put_value(value: Array, cache: Array, block: int, head: int, offset: int) -> None:
    """``value [D]`` float32 into ``cache [blocks, Hkv, 16 or 8, D]``. For compiled functions."""
    raise NotImplementedError("only compiled functions call this")


@overload(put_value)
def _put_value(value: Any, cache: Any, block: Any, head: Any, offset: Any) -> Any:
    def as_it_is(value: Any, cache: Any, block: Any, head: Any, offset: Any) -> None:
        for j in range(value.shape[0]):
            cache[block, head, offset, j] = value[j]

    def rounded(value: Any, cache: Any, block: Any, head: Any, offset: Any) -> None:
        put_rounded_value(value.view(np.uint32), cache[block, head, offset // 2], offset % 2)

    return rounded if cache.dtype == types.uint32 else as_it_is


@njit(nogil=True, cache=True)
def put_rounded_key(bits: Array, words: Array, offset: int) -> None:
    """``bits [D]`` of float32 into ``words [D / 2, 16]``."""
    for pair in range(words.shape[0]):
        first, second = rounded_bits(bits[2 * pair]), rounded_bits(bits[2 * pair + 1])
        words[pair, offset] = np.uint32(second | np.uint32(first >> _HALF))


@njit(nogil=True, cache=True)
def put_rounded_value(bits: Array, words: Array, place: int) -> None:
    """``bits [D]`` of float32 into a half of ``words [D]``: the first token's, or the second's."""
    for j in range(words.shape[0]):
        rounded = rounded_bits(bits[j])
        if place == 0:
            words[j] = np.uint32(rounded >> _HALF)
        else:
            words[j] = np.uint32(rounded | np.uint32(words[j] & _LOWER))
