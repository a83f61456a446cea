"""Transposing one block of 64 tokens in vector registers, as LLVM code for the numba kernel.

A tile of ``width`` rows times ``width`` tokens is read row by row, interleaved, and written token
by token. Once transposed, a vector holds one token of every row: the largest logits of the block
are running maxima of whole vectors, with nothing to reduce at the end.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lexshard.kernels.blocks import BLOCK

WIDTH = 8
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, row: Any, column: Any) -> Any:
    """The address of ``array[row, column]``, and the bytes from one row to the next."""
    matrix = context.make_array(kind)(context, builder, array)
    stride, item = cgutils.unpack_tuple(builder, matrix.strides)
    offset = builder.add(builder.mul(row, stride), builder.mul(column, item))
    return builder.add(builder.ptrtoint(matrix.data, _I64), offset), stride


def _interleaved(builder: Any, vectors: list[Any]) -> list[Any]:
    """The transpose of a square of vectors, in log2(width) rounds of interleaving.

    One round puts ``a0 b0 a1 b1 ...`` of the vectors ``i`` and ``i + width / 2`` in the places
    ``2 i`` and ``2 i + 1``: it rotates the bits of (row, token) by one.
    """
    width = len(vectors)
    kind = ir.VectorType(_I32, width)
    pairs = [(lane // 2) + (lane % 2) * width for lane in range(width)]
    low = ir.Constant(kind, pairs)
    high = ir.Constant(kind, [lane + width // 2 for lane in pairs])
    for _ in range(width.bit_length() - 1):
        halves = zip(vectors[: width // 2], vectors[width // 2 :], strict=True)
        vectors = [builder.shuffle_vector(a, b, mask) for a, b in halves for mask in (low, high)]
    return vectors


@intrinsic(prefer_literal=True)
def transpose_block(typing_context, width, rows, row, logits, token, maxima, block):  # type: ignore[no-untyped-def]
    """``logits[token + t, row + r] = rows[row + r, token + t]`` for 64 ``t`` and ``width`` ``r``.

    ``maxima[block, row + r]`` becomes the largest of row ``r``. ``width`` is a literal power of
    two. Tokens of a row, and rows of a token, lie side by side.
    """
    lanes = width.literal_value
    vector = ir.VectorType(_F32, lanes)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, rows, row, logits, token, maxima, block = arguments
        kinds = signature.args
        source, source_stride = _pointer(context, builder, kinds[1], rows, row, token)
        target, target_stride = _pointer(context, builder, kinds[3], logits, token, row)
        summit, _ = _pointer(context, builder, kinds[5], maxima, block, row)

        def place(base, stride, index, more=0):  # type: ignore[no-untyped-def]
            address = builder.add(base, builder.mul(stride, _I64(index)))
            return builder.inttoptr(builder.add(address, _I64(more)), vector.as_pointer())

        largest = ir.Constant(vector, [float("-inf")] * lanes)
        for first in range(0, BLOCK, lanes):
            read = [
                builder.load(place(source, source_stride, lane, 4 * first), align=4)
                for lane in range(lanes)
            ]
            for lane, values in enumerate(_interleaved(builder, read)):
                builder.store(values, place(target, target_stride, first + lane), align=4)
                largest = _larger(builder, values, largest)
        builder.store(largest, builder.inttoptr(summit, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(width, rows, row, logits, token, maxima, block), generate


@intrinsic
def copy_block(typing_context, source, target, token):  # type: ignore[no-untyped-def]
    """``target[token + t] = source[token + t]`` for 64 ``t``; the largest of them.

    Both are contiguous.
    """
    vector = ir.VectorType(_F32, WIDTH)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        def place(argument, first):  # type: ignore[no-untyped-def]
            kind, array = signature.args[argument], arguments[argument]
            data = context.make_array(kind)(context, builder, array).data
            pointer = builder.gep(data, [builder.add(arguments[2], _I64(first))])
            return builder.bitcast(pointer, vector.as_pointer())

        largest = ir.Constant(vector, [float("-inf")] * WIDTH)
        for first in range(0, BLOCK, WIDTH):
            values = builder.load(place(0, first), align=4)
            builder.store(values, place(1, first), align=4)
            largest = _larger(builder, values, largest)
        for half in (4, 2, 1):
            mask = [(lane + half) % WIDTH for lane in range(WIDTH)]
            turned = ir.Constant(ir.VectorType(_I32, WIDTH), mask)
            largest = _larger(builder, largest, builder.shuffle_vector(largest, largest, turned))
        return builder.extract_element(largest, _I32(0))

    return types.float32(source, target, token), generate


def _larger(builder: Any, values: Any, others: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", values, others), values, others)
