"""The row kernel on the CPU: ``out = x @ weight.T`` whose bits do not depend on the batch.

Weights lie in panels of 16 outputs, ``[panels, K, 16]``, as float32 or, where the float32 values
are exactly bfloat16 (every checkpoint stored in bf16), as their upper 16 bits: the same products
from half the bytes. Every output is one chain of fused multiply-adds over ascending columns,
whichever register tile computes it.

Where activations are rounded to bfloat16, too, pairs of columns lie side by side as words
(`kernels.linear.tile`): the bits are the same with and without instructions for such pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import tile
from lexshard.kernels.processor import has_feature

ROW_BLOCK = 96  # rows whose activations stay in the second-level cache while panels stream by
# The sums of a tile stay in registers: AVX-512 has 32 that hold 16 sums, AVX2 16 that hold 8. A sum
# waits for the one before it, and only many chains keep the processor adding; the more of them are
# of one row, the fewer activations are read. How large a tile is changes no bit.
HAS_AVX512 = has_feature("avx512f")
TILE_ROWS = 6
ONE_ROW_PANELS, TWO_ROW_PANELS, MORE_ROW_PANELS = (4, 4, 4) if HAS_AVX512 else (4, 2, 1)

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


_one, _two, _three, _four, _five, _six = (_tile_of(rows, 1) for rows in range(1, 7))
_wide_one = _tile_of(1, ONE_ROW_PANELS)
_wide_two = _tile_of(2, TWO_ROW_PANELS)
_wide_three, _wide_four, _wide_five, _wide_six = (
    _tile_of(rows, MORE_ROW_PANELS) for rows in range(3, 7)
)


@njit(nogil=True, cache=True, inline="never")
def _narrow_rows(
    x: npt.NDArray[Any],
    row: int,
    stop: int,
    weight: npt.NDArray[Any],
    panel: int,
    out: npt.NDArray[Any],
    add: bool,
) -> None:
    """Rows from ``row`` to ``stop - 1``, one panel."""
    while stop - row >= TILE_ROWS:
        _six(x, row, weight, panel, out, add)
        row += TILE_ROWS
    count = stop - row
    if count == 5:
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
    row: int,
    stop: int,
    weight: npt.NDArray[Any],
    panel: int,
    out: npt.NDArray[Any],
    add: bool,
) -> None:
    """The same for as many panels side by side as `_panels_of` says."""
    while stop - row >= TILE_ROWS:
        _wide_six(x, row, weight, panel, out, add)
        row += TILE_ROWS
    count = stop - row
    if count == 5:
        _wide_five(x, row, weight, panel, out, add)
    elif count == 4:
        _wide_four(x, row, weight, panel, out, add)
    elif count == 3:
        _wide_three(x, row, weight, panel, out, add)
    elif count == 2:
        _wide_two(x, row, weight, panel, out, add)
    elif count == 1:
        _wide_one(x, row, weight, panel, out, add)


@njit(nogil=True, cache=True, inline="always")
def _panels_of(rows: int) -> int:
    if rows == 1:
        return ONE_ROW_PANELS
    return TWO_ROW_PANELS if rows == 2 else MORE_ROW_PANELS


@njit(nogil=True, cache=True)
def multiply_panels(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> None:
    """``multiply`` for the outputs of panels ``first`` to ``last - 1``, of what `operand` makes of
    ``x``."""
    rows = x.shape[0]
    wide = _panels_of(rows)
    for start in range(0, rows, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, rows)
        panel = first
        if wide > 1:
            while panel + wide <= last:
                _wide_rows(x, start, stop, weight, panel, out, add)
                panel += wide
        while panel < last:
            _narrow_rows(x, start, stop, weight, panel, out, add)
            panel += 1


@njit(nogil=True, cache=True)
def multiply(
    x: npt.NDArray[Any], weight: npt.NDArray[Any], out: npt.NDArray[Any], add: bool
) -> None:
    """``out[:T, :P * 16] = x @ weight.T`` (``+=`` where ``add``).

    ``x [T, K] float32``, ``weight [P, K, 16]`` float32 or uint16 (bfloat16 bits), or
    ``[P, ceil(K / 2), 16]`` uint32 (pairs, for which ``x`` is rounded), ``out [>= T, >= P * 16]
    float32``; all C-contiguous.
    """
    multiply_panels(operand(x, weight, weight.shape[1]), weight, out, add, _ZERO, weight.shape[0])


@njit(nogil=True, cache=True)
def operand_rows(x: npt.NDArray[Any], weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`operand` for callers that are not compiled."""
    return operand(x, weight, weight.shape[1])
