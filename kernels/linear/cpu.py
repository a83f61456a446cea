"""The row kernel on the CPU: ``out = x @ weight.T`` whose bits do not depend on the batch.

Weights lie in panels of 16 outputs, ``[panels, K, 16]``, as float32 or, where the float32 values
are exactly bfloat16 (every checkpoint stored in bf16), as their upper 16 bits: the same products
from half the bytes. Every output is one chain of fused multiply-adds over ascending columns,
whichever register tile computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.linear.tile import tile
from lexshard.kernels.processor import has_feature

ROW_BLOCK = 96  # rows whose activations stay in the second-level cache while panels stream by
# The sums of a tile stay in registers: AVX-512 has 32 that hold 16 sums, AVX2 16 that hold 8. Rows
# a power of two apart share 8 places of the first-level cache, so taller tiles were slower. How
# tall a tile is changes no bit.
HAS_AVX512 = has_feature("avx512f")
TILE_ROWS = 8 if HAS_AVX512 else 6


# Panels side by side where there are few rows: a sum waits four cycles for the one before it, and
# only several chains keep the processor adding. A panel is two registers of AVX2's sixteen.
ONE_ROW_PANELS, TWO_ROW_PANELS, THREE_ROW_PANELS = (4, 4, 4) if HAS_AVX512 else (4, 2, 1)

# A literal 0 in a call would compile what is called, and every tile below, once more.
_ZERO = np.int64(0)


@functools.cache  # two functions of one name would be linked as the same code
def _tile_of(rows: int, panels: int) -> Callable[..., None]:
    """The one kernel of ``panels`` panels and exactly ``rows`` rows from ``row`` on."""

    def multiply_tile(x, row, weight, panel, out, add):  # type: ignore[no-untyped-def]
        if add:
            tile(rows, panels, 1, x, row, weight, panel, out)
        else:
            tile(rows, panels, 0, x, row, weight, panel, out)

    # numba tells functions of one name apart by a number that every process counts on its own: from
    # a cache that several filled, one height could be linked in the place of another.
    multiply_tile.__qualname__ = f"multiply_tile_of_{rows}_by_{panels}"
    return njit(nogil=True, cache=True, inline="never")(multiply_tile)


_one, _two, _three, _four, _five, _six, _seven = (_tile_of(rows, 1) for rows in range(1, 8))
_whole_tile = _tile_of(TILE_ROWS, 1)
_wide_one = _tile_of(1, ONE_ROW_PANELS)
_wide_two = _tile_of(2, TWO_ROW_PANELS)
_wide_three = _tile_of(3, THREE_ROW_PANELS)


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
    if count == 7:
        _seven(x, row, weight, panel, out, add)
    elif count == 6:
        _six(x, row, weight, panel, out, add)
    elif count == 5:
        _five(x, row, weight, panel, out, add)
    elif count == 4:
        _four(x, row, weight, panel, out, add)
    elif count == 3:
        _three(x, row, weight, panel, out, add)
    elif count == 2:
        _two(x, row, weight, panel, out, add)
    elif count == 1:
        _one(x, row, weight, panel, out, add)


@njit(nogil=True, cache=True, inline="never")
def _wide_rows(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> int:
    """One to three rows, several panels at a time; the first panel that is left."""
    rows = x.shape[0]
    panel = first
    if rows == 1:
        while panel + ONE_ROW_PANELS <= last:
            _wide_one(x, 0, weight, panel, out, add)
            panel += ONE_ROW_PANELS
    elif rows == 2:
        while panel + TWO_ROW_PANELS <= last:
            _wide_two(x, 0, weight, panel, out, add)
            panel += TWO_ROW_PANELS
    else:
        while panel + THREE_ROW_PANELS <= last:
            _wide_three(x, 0, weight, panel, out, add)
            panel += THREE_ROW_PANELS
    return panel


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
    if 0 < rows <= 3:
        for panel in range(_wide_rows(x, weight, out, add, first, last), last):
            _few_rows(x, _ZERO, rows, weight, panel, out, add)
        return
    for start in range(0, rows, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, rows)
        whole = stop - (stop - start) % TILE_ROWS
        for panel in range(first, last):
            for row in range(start, whole, TILE_ROWS):
                _whole_tile(x, row, weight, panel, out, add)
            _few_rows(x, whole, stop - whole, weight, panel, out, add)


@njit(nogil=True, cache=True)
def multiply(
    x: npt.NDArray[Any], weight: npt.NDArray[Any], out: npt.NDArray[Any], add: bool
) -> None:
    """``out[:T, :P * 16] = x @ weight.T`` (``+=`` where ``add``).

    ``x [T, K] float32``, ``weight [P, K, 16]`` float32 or uint16 (bfloat16 bits), ``out
    [>= T, >= P * 16] float32``; all C-contiguous.
    """
    multiply_panels(x, weight, out, add, _ZERO, weight.shape[0])
