"""Copies in compiled code, and memory to work in. numba's own copies, ``target[:] = source``, bring
the code of an error message with them, a second of compiling for every kernel that is compiled
alone; its own arrays begin in the middle of a line of memory, which vectors then cross."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

LINES = 128  # bytes that processors take from each other: a line, and its neighbour


@njit(nogil=True, cache=True)
def copy_into(target, source):  # type: ignore[no-untyped-def]
    """``target[: len(source)] = source``, of one dimension each; the caller sees that it fits."""
    for index in range(source.size):
        target[index] = source[index]


@njit(nogil=True, cache=True)
def own_lines(rows: int, columns: int) -> npt.NDArray[Any]:
    """An array [rows, columns] float32 that shares no line of memory, nor the one beside it, with
    anything else: what two threads write there would go back and forth between their cores."""
    memory = np.empty(rows * columns + 3 * LINES // 4, np.float32)
    first = -(memory.ctypes.data % LINES) % LINES // 4
    return memory[first : first + rows * columns].reshape(rows, columns)
