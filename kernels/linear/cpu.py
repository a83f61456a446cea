"""The row kernel on the CPU: ``out = x @ weight.T`` whose bits do not depend on the batch.

Weights lie in panels of 16 outputs, ``[panels, K, 16]``, as float32 or, where the float32 values
are exactly bfloat16 (every checkpoint stored in bf16), as their upper 16 bits: the same products
from half the bytes. Every output is one chain of fused multiply-adds over ascending columns,
whichever register tile computes it.

Where activations are rounded to bfloat16, too, pairs of columns lie side by side as words
(`kernels.linear.tile`): the bits are the same with and without instructions for such pairs. Those
of processors that multiply matrices are others (`kernels.linear.matrix`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import overload

from lexshard.kernels.compile_cache import compiled_as
from lexshard.kernels.linear.matrix import multiply_in_vectors, multiply_matrices
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import tile
from lexshard.kernels.processor import has_feature, multiplies_matrices, sums_as_matrices
from lexshard.kernels.team.jobs import run

ROW_BLOCK = 96  # rows whose activations stay in the second-level cache while panels stream by
# The sums of a tile stay in registers: AVX-512 has 32 that hold 16 sums, AVX2 16 that hold 8. A sum
# waits for the one before it, and only many chains keep the processor adding; the more of them are
# of one row, the fewer activations are read. How large a tile is changes no bit.
TILE_ROWS = 6
ONE_ROW_PANELS, TWO_ROW_PANELS, MORE_ROW_PANELS = (4, 4, 4) if has_feature("avx512f") else (4, 2, 1)

# A literal 0 in a call would compile what is called, and every tile below, once more.
_ZERO = np.int64(0)


@functools.cache
def _rows_of(one: int, two: int, more: int) -> Callable[..., None]:
    """Products of rows ``row`` to ``stop - 1`` with as many panels from ``panel`` on as are said
    for a tile of one row, of two, and of more."""

    def multiply_rows(x, row, stop, weight, panel, out, add):  # type: ignore[no-untyped-def]
        while stop - row >= TILE_ROWS:
            tile(TILE_ROWS, more, add, x, row, weight, panel, out)
            row += TILE_ROWS
        count = stop - row
        if count == 5:
            tile(5, more, add, x, row, weight, panel, out)
        elif count == 4:
            tile(4, more, add, x, row, weight, panel, out)
        elif count == 3:
            tile(3, more, add, x, row, weight, panel, out)
        elif count == 2:
            tile(2, two, add, x, row, weight, panel, out)
        elif count == 1:
            tile(1, one, add, x, row, weight, panel, out)

    return compiled_as(f"multiply_rows_by_{one}_{two}_{more}", multiply_rows)


_narrow_rows = _rows_of(1, 1, 1)
_wide_rows = _rows_of(ONE_ROW_PANELS, TWO_ROW_PANELS, MORE_ROW_PANELS)


@njit(nogil=True, cache=True, inline="always")
def _panels_of(rows: int) -> int:
    if rows == 1:
        return ONE_ROW_PANELS
    return TWO_ROW_PANELS if rows == 2 else MORE_ROW_PANELS


@njit(nogil=True, cache=True)
def _multiply_tiles(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> None:
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


def _products(x, weight, out, add, first, last):  # type: ignore[no-untyped-def]
    raise NotImplementedError("only compiled functions call this")


@overload(_products)
def _products_of(x: Any, weight: Any, out: Any, add: Any, first: Any, last: Any) -> Any:
    def by_tiles(x: Any, weight: Any, out: Any, add: Any, first: Any, last: Any) -> None:
        _multiply_tiles(x, weight, out, add, first, last)

    def by_matrices(x: Any, weight: Any, out: Any, add: Any, first: Any, last: Any) -> None:
        multiply_matrices(x, weight, out, add, first, last)

    def in_vectors(x: Any, weight: Any, out: Any, add: Any, first: Any, last: Any) -> None:
        multiply_in_vectors(x, weight, out, add, first, last)

    if weight.dtype != types.uint32 or not sums_as_matrices():
        return by_tiles
    return by_matrices if multiplies_matrices() else in_vectors


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
    _products(x, weight, out, add, first, last)


@njit(nogil=True, cache=True)
def multiply(
    x: npt.NDArray[Any], weight: npt.NDArray[Any], out: npt.NDArray[Any], add: bool
) -> None:
    """``out[:T, :P * 16] = x @ weight.T`` (``+=`` where ``add``).

    ``x [T, K] float32``, ``weight [P, K, 16]`` float32 or uint16 (bfloat16 bits), or
    ``[P, pairs, 16]`` uint32 (for which ``x`` is rounded), ``out [>= T, >= P * 16]
    float32``; all C-contiguous.
    """
    multiply_panels(operand(x, weight, weight.shape[1]), weight, out, add, _ZERO, weight.shape[0])


@njit(nogil=True, cache=True)
def _multiply_part(
    rank: int,
    size: int,
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
) -> None:
    panels = weight.shape[0]
    multiply_panels(x, weight, out, False, panels * rank // size, panels * (rank + 1) // size)


@njit(nogil=True, cache=True)
def multiply_in_team(
    team: npt.NDArray[Any],
    size: int,
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
) -> None:
    """`multiply`, stored, by ``size`` threads of a team."""
    run(team, size, _multiply_part, (operand(x, weight, weight.shape[1]), weight, out))
