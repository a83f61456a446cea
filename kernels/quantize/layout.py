"""How nibbles lie in memory, so that a vector of eight 32-bit sums never mixes two groups.

Columns come in blocks of 128, four groups of 32. Sum ``l`` of a block adds up 16 columns of group
``l // 2``, two at a time: step ``k`` of 8 takes columns ``16 l + 2 k`` and ``16 l + 2 k + 1``. So
the columns of a block are stored as [8 steps, 8 sums, 2], and a byte holds a column of an even
step in its low nibble and the same place of the following step in its high nibble.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
BLOCK = 128
SUMS = 8


def padded(columns: int, multiple: int) -> int:
    """``columns`` rounded up to a multiple."""
    return columns + -columns % multiple


def pack_nibbles(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Integers in [-8, 7], ``values`` [R, D] with D a multiple of 128, as bytes [R, D / 2]."""
    rows, columns = values.shape
    steps = values.astype(np.int8).reshape(rows, columns // BLOCK, SUMS, 8, 2)
    steps = steps.transpose(0, 1, 3, 2, 4).reshape(rows, columns // BLOCK, 4, 2, 16)
    nibbles = steps.view(np.uint8) & 15
    packed = nibbles[:, :, :, 0] | nibbles[:, :, :, 1] << 4
    return packed.astype(np.uint8, copy=False).reshape(rows, columns // 2)


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """The integers [R, D] of ``packed`` [R, D / 2]."""
    rows, half = packed.shape
    groups = packed.view(np.int8).reshape(rows, 2 * half // BLOCK, 4, 1, 16)
    low, high = groups << 4 >> 4, groups >> 4
    steps = np.concatenate([low, high], axis=3).reshape(rows, 2 * half // BLOCK, 8, SUMS, 2)
    return steps.transpose(0, 1, 3, 2, 4).reshape(rows, 2 * half)
