"""Screens of int8 rows with AMX: the integers of `kernels.screen.vnni`, more of them at once.

Registers hold 64 bytes of 16 weight rows as they lie in memory, and of 16 hidden rows as words of
four bytes, which are turned for that once. What they make has weight rows by hidden rows, and is
turned, too, before it is scaled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lexshard.kernels.linear.matrix import (
    CONFIGURATIONS,
    MATRIX,
    MOST_ROWS,
    configure,
    products,
    release,
)
from lexshard.kernels.processor import has_feature, multiplies_matrices

AVAILABLE = multiplies_matrices() and has_feature("amx-int8")
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ZERO = np.int64(0)
_ROW = ir.VectorType(_I32, MATRIX)


@intrinsic
def _turn(
    typing_context: Any,
    source: Any,
    row: Any,
    column: Any,
    target: Any,
    to_row: Any,
    to_column: Any,
) -> Any:
    """``target[to_row + b, to_column + a] = source[row + a, column + b]`` for 16 a and b; both
    int32, C-contiguous."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def rows_of(kind: Any, value: Any, first: Any, place: Any) -> list[Any]:
            array = context.make_array(kind)(context, builder, value)
            width = cgutils.unpack_tuple(builder, array.shape)[1]
            places = [builder.mul(builder.add(first, _I64(each)), width) for each in range(MATRIX)]
            return [
                builder.bitcast(
                    builder.gep(array.data, [builder.add(each, place)]), _ROW.as_pointer()
                )
                for each in places
            ]

        there = rows_of(target, *arguments[3:])
        lines = [builder.load(each, align=4) for each in rows_of(source, *arguments[:3])]
        lanes = range(MATRIX)
        for apart in (1, 2, 4, 8):  # numbers that are so far from the diagonal change places
            upper = [lane + MATRIX - apart if lane & apart else lane for lane in lanes]
            lower = [lane + MATRIX if lane & apart else lane + apart for lane in lanes]
            for first in lanes:
                if not first & apart:
                    pair = lines[first], lines[first + apart]
                    for place, mask in ((first, upper), (first + apart, lower)):
                        chosen = ir.Constant(_ROW, mask)
                        lines[place] = builder.shuffle_vector(*pair, chosen)
        for line, address in zip(lines, there, strict=True):
            builder.store(line, address, align=4)
        return context.get_dummy_value()

    places = (types.intp, types.intp)
    return types.void(source, *places, target, *places), code_generator


@njit(nogil=True, cache=True)
def turned(hidden: npt.NDArray[np.int8]) -> npt.NDArray[np.uint32]:
    """``hidden [N, D]`` by words of four, 16 rows side by side: ``[ceil(N / 16), D / 4, 16]``."""
    words = hidden.view(np.uint32)
    groups = (words.shape[0] + MATRIX - 1) // MATRIX
    out = np.zeros((groups, words.shape[1], MATRIX), np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            out[row // MATRIX, word, row % MATRIX] = words[row, word]
    return out


@njit(nogil=True, cache=True)
def sum_rows(
    values: npt.NDArray[np.int8],
    first: int,
    last: int,
    hidden: npt.NDArray[np.uint32],
    totals: npt.NDArray[np.int32],
    sums: npt.NDArray[np.int32],
) -> None:
    """``sums[n, v] = sum_j values[first + v, j] hidden[n, j]`` for the rows up to ``last - 1``.

    ``values [V, D]`` with D a multiple of 64, ``hidden`` as `turned`. ``sums [16 groups, S]`` has
    columns for a multiple of `MATRIX` rows; what is written behind the last row and the last hidden
    row means nothing. ``totals [MOST_ROWS, 16 groups]`` is room to work in.
    """
    groups, words = hidden.shape[0], values.view(np.uint32)
    for start in range(first, last, MOST_ROWS):
        count = min(MOST_ROWS, last - start)
        if start == first or count < MOST_ROWS:
            configure(CONFIGURATIONS, count - 1)
        for group in range(groups):
            column = MATRIX * group
            if count > MATRIX and group == 0:
                products(2, 1, 1, words, start, hidden, group, totals, _ZERO, column)
            elif count > MATRIX:
                products(2, 1, 0, words, start, hidden, group, totals, _ZERO, column)
            else:
                products(1, 1, 0, words, start, hidden, group, totals, _ZERO, column)
        for row in range(0, count, MATRIX):
            for query in range(0, MATRIX * groups, MATRIX):
                _turn(totals, row, query, sums, query, start - first + row)
    release()
