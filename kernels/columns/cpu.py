"""Rows to columns in numba: squares of eight, four or two rows, each block of 64 tokens at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.columns.tile import copy_block, transpose_block


@njit(nogil=True, cache=True)
def _write_part(rows, logits, maxima, start, stop):  # type: ignore[no-untyped-def]
    """The last block, where it is shorter than the others."""
    for row in range(rows.shape[0]):
        largest = np.float32(-np.inf)
        for token in range(start, stop):
            logits[token, row] = rows[row, token]
            largest = max(largest, rows[row, token])
        maxima[-1, row] = largest


@njit(nogil=True, cache=True)
def _write_columns(rows, logits, maxima):  # type: ignore[no-untyped-def]
    count, size = rows.shape
    whole = size // BLOCK
    for block in range(whole):
        token = block * BLOCK
        row = 0
        while row < count:
            # A square that would stick out moves back: some rows are then written twice alike.
            if count >= 8 and count - row > 4:
                row = min(row, count - 8)
                transpose_block(8, rows, row, logits, token, maxima, block)
                row += 8
            elif count >= 4 and count - row > 2:
                row = min(row, count - 4)
                transpose_block(4, rows, row, logits, token, maxima, block)
                row += 4
            else:
                row = min(row, count - 2)
                transpose_block(2, rows, row, logits, token, maxima, block)
                row += 2
    if whole * BLOCK < size:
        _write_part(rows, logits, maxima, whole * BLOCK, size)


@njit(nogil=True, cache=True)
def _write_column(rows, logits, maxima):  # type: ignore[no-untyped-def]
    """A single row and its column lie in memory alike."""
    row = rows[0]
    column = logits.reshape(-1)
    whole = row.size // BLOCK
    for block in range(whole):
        maxima[block, 0] = copy_block(row, column, block * BLOCK)
    if whole * BLOCK < row.size:
        _write_part(rows, logits, maxima, whole * BLOCK, row.size)


def write_columns(
    rows: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float32],
    maxima: npt.NDArray[np.float32],
) -> None:
    if len(rows) == 1:
        _write_column(rows, logits, maxima)
    else:
        _write_columns(rows, logits, maxima)
