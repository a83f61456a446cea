"""The row kernel on the CPU: ``out = x @ weight.T`` whose bits do not depend on the batch.

Weights lie in panels of 16 outputs, ``[panels, K, 16]``, as float32 or, where the float32 values
are exactly bfloat16 (every checkpoint stored in bf16), as their upper 16 bits: the same products
from half the bytes. Every output is one chain of fused multiply-adds over ascending columns,
whichever register tile computes it.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from numba import njit

from kernels.linear.tile import tile

ROW_BLOCK = 96  # rows whose activations stay in the second-level cache while panels stream by
TILE_ROWS = 6  # 6 rows x 16 outputs: 12 accumulators of the 16 AVX2 registers


@njit(nogil=True, cache=True, inline="never")
def _one_row(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> None:
    """One row: four panels side by side, so that eight chains hide the latency of one."""
    whole = last - (last - first) % 4
    for panel in range(first, whole, 4):
        if add:
            tile(1, 4, 1, x, 0, weight, panel, out)
        else:
            tile(1, 4, 0, x, 0, weight, panel, out)
    for panel in range(whole, last):
        if add:
            tile(1, 1, 1, x, 0, weight, panel, out)
        else:
            tile(1, 1, 0, x, 0, weight, panel, out)


@njit(nogil=True, cache=True, inline="never")
def _few_rows(
    x: npt.NDArray[Any],
    row: int,
    count: int,
    weight: npt.NDArray[Any],
    panel: int,
    out: npt.NDArray[Any],
    add: bool,
) -> None:
    """Fewer rows than a full tile, one panel."""
    if count == 5:
        if add:
            tile(5, 1, 1, x, row, weight, panel, out)
        else:
            tile(5, 1, 0, x, row, weight, panel, out)
    elif count == 4:
        if add:
            tile(4, 1, 1, x, row, weight, panel, out)
        else:
            tile(4, 1, 0, x, row, weight, panel, out)
    elif count == 3:
        if add:
            tile(3, 1, 1, x, row, weight, panel, out)
        else:
            tile(3, 1, 0, x, row, weight, panel, out)
    elif count == 2:
        if add:
            tile(2, 1, 1, x, row, weight, panel, out)
        else:
            tile(2, 1, 0, x, row, weight, panel, out)
    elif count == 1:
        if add:
            tile(1, 1, 1, x, row, weight, panel, out)
        else:
            tile(1, 1, 0, x, row, weight, panel, out)


@njit(nogil=True, cache=True)
def multiply_panels(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> None:
    """``multiply`` for the outputs of panels ``first`` to ``last - 1`` only."""
    rows = x.shape[0]
    if rows == 1:
        _one_row(x, weight, out, add, first, last)
        return
    for start in range(0, rows, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, rows)
        whole = stop - (stop - start) % TILE_ROWS
        for panel in range(first, last):
            for row in range(start, whole, TILE_ROWS):
                if add:
                    tile(6, 1, 1, x, row, weight, panel, out)
                else:
                    tile(6, 1, 0, x, row, weight, panel, out)
            _few_rows(x, whole, stop - whole, weight, panel, out, add)


@njit(nogil=True, cache=True)
def multiply(
    x: npt.NDArray[Any], weight: npt.NDArray[Any], out: npt.NDArray[Any], add: bool
) -> None:
    """``out[:T, :P * 16] = x @ weight.T`` (``+=`` where ``add``).

    ``x [T, K] float32``, ``weight [P, K, 16]`` float32 or uint16 (bfloat16 bits), ``out
    [>= T, >= P * 16] float32``; all C-contiguous.
    """
    multiply_panels(x, weight, out, add, 0, weight.shape[0])
