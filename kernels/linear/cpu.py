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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import overload

from lexshard.kernels.compile_cache import compiled_as
from lexshard.kernels.linear.matrix import multiply_in_vectors, multiply_matrices
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import tile
from lexshard.kernels.processor import (
    has_feature,
    multiplies_matrices,
    processor_name,
    sums_as_matrices,
)
from lexshard.kernels.team.jobs import run

ROW_BLOCK = 96  # rows whose activations stay in the second-level cache while panels stream by
# The sums of a tile stay in registers: AVX-512 has 32 that hold 16 sums, AVX2 16 that hold 8. A sum
# waits for the one before it, and only many chains keep the processor adding; the more of them are
# of one row, the fewer activations are read. How large a tile is changes no bit.
WIDE = has_feature("avx512f")
FEW_ROWS = 4
FAR_BYTES = 2**20  # of a product of a model that caches do not hold
# Following panels of more bytes are not asked for as a whole, which the cache of a core would not
# hold, but so many bytes ahead.
MOST_FETCHED, AHEAD = 2**18, 4096
# Of panels that are one stream.
COMPACT_AHEAD = 4096 if processor_name() == "znver4" else 8192

# A literal 0 in a call would compile what is called, and every tile below, once more.
_ZERO = np.int64(0)


@njit(nogil=True, cache=True, inline="always")
def _ahead(weight: npt.NDArray[Any], panels: int, number: int) -> int:
    """How many weights behind its own first a tile of so many ``panels`` asks for; those that
    multiply the same panels have numbers, and each asks for another one, while there are any."""
    panel = weight.shape[1] * weight.shape[2]
    following = panels * panel
    if weight.itemsize > 1 and following * weight.itemsize > MOST_FETCHED:
        following = AHEAD // weight.itemsize
    return following + number * panel if number < panels else 0


@njit(nogil=True, cache=True, inline="always")
def _ahead_of_few(weight: npt.NDArray[Any], panels: int) -> int:
    """The same of a tile that is the only one that multiplies its panels."""
    return COMPACT_AHEAD if weight.itemsize == 1 else _ahead(weight, panels, 0)


class Tiling(NamedTuple):
    """Panels of tiles of one row, of two, of up to four, of those of more rows that are alone, and
    of those that share panels; the most rows of a tile; and from how many rows on panels that
    follow are asked for. What a processor fetches by itself falls behind while rows keep it
    computing, and the fewer panels there are at a time, the faster memory gives them."""

    one: int
    two: int
    few: int
    alone: int
    more: int
    most: int
    asking: int


_NEVER = 1 << 20
NEAR = Tiling(4, 4, 4, 4, 4, 6, _NEVER) if WIDE else Tiling(4, 2, 1, 1, 1, 6, 3)
FAR_HALVES = Tiling(2, 2, 2, 2, 2, 8, 1) if WIDE else Tiling(2, 2, 1, 1, 1, 6, 1)
# AVX-512 multiplies words as they are: one or two rows then do nothing but wait for memory.
FAR_WORDS = Tiling(4, 4, 1, 1, 2, 8, 3) if WIDE else FAR_HALVES
if WIDE and processor_name() == "znver4":
    # Its sums come so late that one panel of eight rows is too few of them, and weights of 16 bits
    # keep it busy widening them: then memory needs no help.
    FAR_HALVES, FAR_WORDS = NEAR, Tiling(4, 4, 1, 2, 2, 8, 3)
COMPACT = Tiling(2, 2, 2, 2, 2, 8, 1)  # panels share their lines by twos
NARROW = Tiling(1, 1, 1, 1, 1, 6, _NEVER)


@functools.cache
def _rows_of(
    one: int, two: int, few: int, alone: int, more: int, most: int, asking: int
) -> Callable[..., int]:
    """By a tiling: products of rows ``row`` to ``stop - 1`` with the panels from ``panel`` on.
    Returns the first of those that are left, fewer than are taken at a time, up to ``last``."""
    of_one, of_two, of_few, of_alone, of_more = (
        panels if rows >= asking else 0
        for rows, panels in ((1, one), (2, two), (4, few), (most, alone), (most, 1))
    )
    second, third, fourth, fifth = most - 1, most - 2, most - 3, most - 4

    def multiply_rows(x, row, stop, weight, panel, last, out, add):  # type: ignore[no-untyped-def]
        count = stop - row
        if count > most:
            tiles = (count + most - 1) // most
            least = count // tiles
            larger = count - tiles * least
            while panel + more <= last:
                start = row
                for number in range(tiles):
                    size = least + 1 if number < larger else least
                    ahead = _ahead(weight, more, number)
                    if size == most:
                        tile(most, more, of_more, add, x, start, weight, panel, ahead, out)
                    elif size == second:
                        tile(second, more, of_more, add, x, start, weight, panel, ahead, out)
                    elif size == third:
                        tile(third, more, of_more, add, x, start, weight, panel, ahead, out)
                    elif size == fourth:
                        tile(fourth, more, of_more, add, x, start, weight, panel, ahead, out)
                    else:
                        tile(fifth, more, of_more, add, x, start, weight, panel, ahead, out)
                    start += size
                panel += more
        elif count > FEW_ROWS:
            ahead = _ahead_of_few(weight, alone)
            while panel + alone <= last:
                if count == most:
                    tile(most, alone, of_alone, add, x, row, weight, panel, ahead, out)
                elif count == second:
                    tile(second, alone, of_alone, add, x, row, weight, panel, ahead, out)
                elif count == third:
                    tile(third, alone, of_alone, add, x, row, weight, panel, ahead, out)
                else:
                    tile(fourth, alone, of_alone, add, x, row, weight, panel, ahead, out)
                panel += alone
        elif count > 2:
            ahead = _ahead_of_few(weight, few)
            while panel + few <= last:
                if count == 4:
                    tile(4, few, of_few, add, x, row, weight, panel, ahead, out)
                else:
                    tile(3, few, of_few, add, x, row, weight, panel, ahead, out)
                panel += few
        elif count == 2:
            ahead = _ahead_of_few(weight, two)
            while panel + two <= last:
                tile(2, two, of_two, add, x, row, weight, panel, ahead, out)
                panel += two
        else:
            ahead = _ahead_of_few(weight, one)
            while panel + one <= last:
                tile(1, one, of_one, add, x, row, weight, panel, ahead, out)
                panel += one
        return panel

    name = f"multiply_rows_by_{one}_{two}_{few}_{alone}_{more}_up_to_{most}_asking_from_{asking}"
    return compiled_as(name, multiply_rows)


_near_rows, _narrow_rows = _rows_of(*NEAR), _rows_of(*NARROW)
_far_words, _far_halves = _rows_of(*FAR_WORDS), _rows_of(*FAR_HALVES)
_compact_rows = _rows_of(*COMPACT)


def _whole_tiles(x, row, stop, weight, panel, last, out, add):  # type: ignore[no-untyped-def]
    raise NotImplementedError("only compiled functions call this")


@overload(_whole_tiles)
def _whole_tiles_of(  # type: ignore[no-untyped-def]
    x, row, stop, weight, panel, last, out, add
):
    def of_words(x, row, stop, weight, panel, last, out, add):  # type: ignore[no-untyped-def]
        if weight.size * weight.itemsize > FAR_BYTES:
            return _far_words(x, row, stop, weight, panel, last, out, add)
        return _near_rows(x, row, stop, weight, panel, last, out, add)

    def of_halves(x, row, stop, weight, panel, last, out, add):  # type: ignore[no-untyped-def]
        if weight.size * weight.itemsize > FAR_BYTES:
            return _far_halves(x, row, stop, weight, panel, last, out, add)
        return _near_rows(x, row, stop, weight, panel, last, out, add)

    def of_compact(x, row, stop, weight, panel, last, out, add):  # type: ignore[no-untyped-def]
        if panel % 2 == 1 and panel < last:
            panel = _narrow_rows(x, row, stop, weight, panel, panel + 1, out, add)
        return _compact_rows(x, row, stop, weight, panel, last, out, add)

    if weight.dtype == types.uint8:
        return of_compact
    return of_halves if weight.dtype == types.uint16 else of_words


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
    for start in range(0, rows, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, rows)
        panel = _whole_tiles(x, start, stop, weight, first, last, out, add)
        if panel < last:
            _narrow_rows(x, start, stop, weight, panel, last, out, add)


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
