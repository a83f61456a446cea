"""Masks: which tokens a row may draw, a bit per token and a word per block of 64.

Bits beyond the vocabulary say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.blocks import BLOCK, blocks_of

Words = npt.NDArray[np.uint64]

NONE, ONE, SIX, LOW_SIX = np.uint64(0), np.uint64(1), np.uint64(6), np.uint64(63)
_FIRST, _SECOND = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_FOURTH, _BYTES = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)
_TWO, _FOUR, _LAST_BYTE = np.uint64(2), np.uint64(4), np.uint64(56)


@njit(nogil=True, cache=True, inline="always")
def allows(words, token):  # type: ignore[no-untyped-def]
    """Whether a mask of ``words`` holds the token."""
    bit = np.uint64(token)
    return (words[bit >> SIX] >> (bit & LOW_SIX)) & ONE == ONE


@njit(nogil=True, cache=True, inline="always")
def bits_of(word):  # type: ignore[no-untyped-def]
    """How many bits of a word are set."""
    word = word - ((word >> ONE) & _FIRST)
    word = (word & _SECOND) + ((word >> _TWO) & _SECOND)
    word = (word + (word >> _FOUR)) & _FOURTH
    return np.int64((word * _BYTES) >> _LAST_BYTE)


@njit(nogil=True, cache=True, inline="always")
def lowest_bit(word):  # type: ignore[no-untyped-def]
    """The place of the lowest bit that is set of a word that has one."""
    return bits_of((word & (~word + ONE)) - ONE)


@njit(nogil=True, cache=True)
def count_of(words):  # type: ignore[no-untyped-def]
    """How many tokens a mask holds."""
    count = 0
    for block in range(words.size):
        count += bits_of(words[block])
    return count


@njit(nogil=True, cache=True)
def ids_of(words, size):  # type: ignore[no-untyped-def]
    """The tokens below ``size`` that a mask holds, in order."""
    ids = np.empty(count_of(words), np.int32)
    count = 0
    for block in range(words.size):
        word = words[block]
        while word != NONE:
            token = block * BLOCK + lowest_bit(word)
            word &= word - ONE
            if token < size:
                ids[count] = token
                count += 1
    return ids[:count]


def mask_words(ids: Iterable[int] | npt.NDArray[np.integer], vocabulary_size: int) -> Words:
    """The mask that holds ``ids``, in any order: [ceil(V / 64)]. Those that are no tokens of the
    vocabulary are left out."""
    bits = np.zeros(blocks_of(vocabulary_size) * BLOCK, np.bool_)
    wanted = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    bits[wanted[(wanted >= 0) & (wanted < vocabulary_size)]] = True
    return np.packbits(bits, bitorder="little").view(np.uint64)


def rows_of_mask(masks: Words, ids: npt.NDArray[np.int32]) -> Words:
    """``masks`` [M, B] of tokens as masks of rows, row ``i`` being token ``ids[i]``: [M, ceil(n /
    64)]."""
    wanted = ids.astype(np.uint64)
    bits = (masks[:, wanted >> SIX] >> (wanted & LOW_SIX)) & ONE
    padded = np.zeros((len(masks), blocks_of(len(ids)) * BLOCK), np.bool_)
    padded[:, : len(ids)] = bits
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint64)
