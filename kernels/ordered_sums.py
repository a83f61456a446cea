"""Sums in an order of their own: the same bits whatever the processor's vectors are.

A compiler that may reorder a sum takes as many partial sums as fit the vectors that it likes best,
which are of 256 bits for some processors and of 512 for others. Here they are counted: 32 of fp32
or 16 of float64, added up by quarters (of products one after the other, of numbers two and two)
and then by halves; what is left of a row comes after that: as 256-bit processors always had it.
The loops are written as LLVM vector code, for numba vectorises no sum that it may not reorder.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

I32, I64 = ir.IntType(32), ir.IntType(64)
_PARTS = 4  # vectors side by side, of 256 bits each


@njit(nogil=True, cache=True, error_model="numpy")
def squares(row):  # type: ignore[no-untyped-def]
    """The sum of squares of fp32 numbers [d], side by side in memory; in fp32."""
    whole = row.size - row.size % 32
    total = _squares(row, whole)
    for column in range(whole, row.size):
        total += row[column] * row[column]
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def dot(left, right):  # type: ignore[no-untyped-def]
    """The sum of products of numbers [d], side by side in memory, fp32 or float64; in float64."""
    whole = left.size - left.size % 16
    total = _dot(left, right, whole)
    for column in range(whole, left.size):
        total += np.float64(left[column]) * np.float64(right[column])
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def norms(rows):  # type: ignore[no-untyped-def]
    """The norms [N] of rows [N, d] of fp32 numbers, side by side in memory; in float64."""
    result = np.empty(rows.shape[0])
    for row in range(rows.shape[0]):
        result[row] = math.sqrt(dot(rows[row], rows[row]))
    return result


@njit(nogil=True, cache=True, error_model="numpy")
def total(values):  # type: ignore[no-untyped-def]
    """The sum of float64 numbers [d], side by side in memory."""
    whole = values.size - values.size % 16
    result = _total(values, whole)
    for column in range(whole, values.size):
        result += values[column]
    return result


@intrinsic
def _squares(typingctx, row, count):  # type: ignore[no-untyped-def]
    return _summed(types.float32, 32, (row,), count, lambda builder, own: builder.fmul(*own * 2))


@intrinsic
def _dot(typingctx, left, right, count):  # type: ignore[no-untyped-def]
    return _summed(types.float64, 16, (left, right), count, lambda builder, own: builder.fmul(*own))


@intrinsic
def _total(typingctx, values, count):  # type: ignore[no-untyped-def]
    return _summed(types.float64, 16, (values,), count, lambda builder, own: own[0], by_pairs=True)


def _summed(
    result: Any,
    lanes: int,
    arrays: tuple[Any, ...],
    count: Any,
    term: Any,
    *,
    by_pairs: bool = False,
) -> Any:
    """Signature and code of a sum of ``term`` over the first ``count`` numbers, a multiple of
    ``lanes``, of contiguous ``arrays``."""
    if not all(array.layout == "C" and array.ndim == 1 for array in arrays):
        raise TypeError(f"sums are of numbers side by side, not of {arrays}")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = context.get_value_type(result)
        vector = ir.VectorType(element, lanes)
        bases = [
            context.make_array(array)(context, builder, argument).data
            for array, argument in zip(arrays, arguments[:-1], strict=True)
        ]
        entry = builder.block
        head, body, done = map(builder.append_basic_block, ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        column, sums = builder.phi(I64), builder.phi(vector)
        column.add_incoming(I64(0), entry)
        sums.add_incoming(ir.Constant(vector, [0.0] * lanes), entry)
        builder.cbranch(builder.icmp_signed("<", column, arguments[-1]), body, done)
        builder.position_at_end(body)
        own = tuple(
            _loaded(context, builder, array, base, column, vector)
            for array, base in zip(arrays, bases, strict=True)
        )
        after = builder.fadd(sums, term(builder, own))
        column.add_incoming(builder.add(column, I64(lanes)), body)
        sums.add_incoming(after, body)
        builder.branch(head)
        builder.position_at_end(done)
        return _folded(builder, sums, lanes, by_pairs=by_pairs)

    return result(*arrays, count), codegen


def _loaded(context: Any, builder: Any, array: Any, base: Any, column: Any, vector: Any) -> Any:
    """As many numbers from ``column`` on as ``vector`` has, in its precision."""
    stored = ir.VectorType(context.get_value_type(array.dtype), vector.count)
    pointer = builder.bitcast(builder.gep(base, [column]), stored.as_pointer())
    loaded = builder.load(pointer, align=array.dtype.bitwidth // 8)
    return loaded if stored == vector else builder.fpext(loaded, vector)


def _folded(builder: Any, sums: Any, lanes: int, *, by_pairs: bool) -> Any:
    """The quarters, then halves of what they came to."""
    width = lanes // _PARTS

    def some(vector: Any, first: int, count: int) -> Any:
        mask = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
        return builder.shuffle_vector(vector, vector, mask)

    first, *others = (some(sums, part * width, width) for part in range(_PARTS))
    if by_pairs:
        last = builder.fadd(others[1], others[2])
        folded = builder.fadd(builder.fadd(first, others[0]), last)
    else:
        folded = first
        for other in others:
            folded = builder.fadd(folded, other)
    while width > 1:
        width //= 2
        folded = builder.fadd(some(folded, 0, width), some(folded, width, width))
    return builder.extract_element(folded, I32(0))
