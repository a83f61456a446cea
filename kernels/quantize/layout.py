"""How nibbles and signs lie in memory.

Nibbles lie so that a vector of eight 32-bit sums never mixes two groups.

Columns come in blocks of 128, four groups of 32. Sum ``l`` of a block adds up 16 columns of group
``l // 2``, two at a time: step ``k`` of 8 takes columns ``16 l + 2 k`` and ``16 l + 2 k + 1``. So
the columns of a block are stored as [8 steps, 8 sums, 2], and a byte holds a column of an even
step in its low nibble and the same place of the following step in its high nibble. Hidden states
that meet nibbles have their steps in the order 0 2 1 3, 4 6 5 7: what 32 bytes hold in their low
nibbles, then what they hold in their high ones.

Signs lie in panels of 64 rows, so that one vector holds the same eight columns of many rows: each
half of a byte then looks up the sum of its four columns in a table of sixteen. Sums of 16 bits are
first added up for even and odd bytes apart, so byte ``2 l`` of 32 belongs to row ``l`` and byte
``2 l + 1`` to row ``16 + l``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

GROUP = 32
BLOCK = 128
SUMS = 8
PANEL_ROWS = 64
LINE = 64  # bytes of a cache line


def padded(columns: int, multiple: int) -> int:
    """``columns`` rounded up to a multiple."""
    return columns + -columns % multiple


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin with a cache line, so that no vector of a row crosses one. A large array
    takes memory where it is first written; torch's zeros are written at once."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return memory[first : first + size].view(dtype).reshape(shape)


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


def _panel_places() -> npt.NDArray[np.int64]:
    """The byte of every row of a panel."""
    half, row = np.divmod(np.arange(PANEL_ROWS), 32)
    return 32 * half + 2 * (row % 16) + row // 16


def pack_signs(positive: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Which of [R, D] are positive, D a multiple of 8, as bytes [ceil(R / 64), D / 8, 64].

    Bit ``c`` of byte ``s`` is column ``8 s + c``. The rows missing in the last panel are zero.
    """
    rows, columns = positive.shape
    packed = np.packbits(positive, axis=1, bitorder="little")
    packed = np.pad(packed, ((0, -rows % PANEL_ROWS), (0, 0)))
    panels = packed.reshape(-1, PANEL_ROWS, columns // 8).transpose(0, 2, 1)
    result: npt.NDArray[np.uint8] = aligned(panels.shape, np.uint8)
    result[:, :, _panel_places()] = panels
    return result


def unpack_signs(
    packed: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int8]:
    """1 where positive, otherwise -1, for ``rows`` [R] of ``packed``: [R, D]."""
    panel, place = np.divmod(rows, PANEL_ROWS)
    bits = packed[panel, :, _panel_places()[place]]
    positive = np.unpackbits(bits, axis=1, bitorder="little").astype(np.int8)
    return 2 * positive - 1


def pack_panels(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """``values`` [R, K] as panels [ceil(R / 64), K, 64], zero beyond the last row."""
    padded_rows = np.pad(values, ((0, -len(values) % PANEL_ROWS), (0, 0)))
    panels = padded_rows.reshape(-1, PANEL_ROWS, values.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(panels)
