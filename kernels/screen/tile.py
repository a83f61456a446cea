"""Integer dots of one weight row with a few hidden rows as LLVM vectors, for numba kernels.

Sixteen products of 16-bit numbers are added in pairs into eight 32-bit sums, in the form that LLVM
recognises as one multiply-add instruction (``vpmaddwd`` on x86). Sums wrap around; the caller
keeps the totals inside 32 bits, and then what happens on the way does not matter. One weight row
at a time reads memory in order, which measured faster than tiles of several short rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
LANES = 16
SUMS = 8
LINE = 64  # bytes of a cache line: 64 int8, or 128 nibbles
PANEL = 16  # weight rows that callers work on before they move on
BYTES = ir.VectorType(I8, LANES)
WORDS = ir.VectorType(I16, LANES)
PRODUCTS = ir.VectorType(I32, LANES)
TOTALS = ir.VectorType(I32, SUMS)


def _mask(indices: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(indices)), indices)


def _multiply_add(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    """Sum ``l`` is ``left[2 l] right[2 l] + left[2 l + 1] right[2 l + 1]``."""
    products = builder.mul(builder.sext(left, PRODUCTS), builder.sext(right, PRODUCTS))
    even, odd = (_mask(list(range(parity, LANES, 2))) for parity in (0, 1))
    pairs = [builder.shuffle_vector(products, products, mask) for mask in (even, odd)]
    return builder.add(*pairs)


def _tree(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The sum of a power of two of vectors, two by two."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [builder.add(*pair) for pair in zip(vectors[:half], vectors[half:], strict=True)]
    return vectors[0]


def _load(builder: ir.IRBuilder, base: Any, offset: Any, vector: ir.VectorType, align: int) -> Any:
    address = builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())
    return builder.load(address, align=align)


def _prefetch(builder: ir.IRBuilder, row: Any, offset: Any, width: Any) -> None:
    """Fetches the line at ``offset`` of the row one panel further on.

    Beyond the last row this reads nothing: prefetching an unmapped address has no effect.
    """
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32]),
        "llvm.prefetch.p0",
    )
    ahead = builder.gep(row, [builder.add(offset, builder.mul(width, I64(PANEL)))])
    builder.call(prefetch, [ahead, I32(0), I32(2), I32(1)])  # to read, second level, data


def _matrix(context: Any, builder: Any, matrix_type: Any, value: Any, row: Any) -> tuple[Any, Any]:
    """A pointer to a row of a C-contiguous matrix, and its width."""
    matrix = context.make_array(matrix_type)(context, builder, value)
    width = cgutils.unpack_tuple(builder, matrix.shape)[1]
    return builder.gep(matrix.data, [builder.mul(row, width)]), width


def _following(builder: ir.IRBuilder, first: Any, width: Any, count: int) -> list[Any]:
    """Pointers to ``count`` rows from ``first`` on."""
    return [builder.gep(first, [builder.mul(width, I64(row))]) for row in range(count)]


def _sum_lines(
    builder: ir.IRBuilder,
    lines: Any,
    targets: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    *,
    negate: bool = False,
) -> None:
    """Runs ``body(line, sums) -> sums`` for all lines (at least 1), a vector of sums per target,
    and stores the total of each, or its negative."""
    before = builder.block
    loop = builder.append_basic_block("lines")
    done = builder.append_basic_block("lines_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    line = builder.phi(I64)
    line.add_incoming(I64(0), before)
    sums = [builder.phi(TOTALS) for _ in targets]
    for phi in sums:
        phi.add_incoming(ir.Constant(TOTALS, [0] * SUMS), before)
    updated = body(line, sums)
    following = builder.add(line, I64(1))
    line.add_incoming(following, loop)
    for phi, value in zip(sums, updated, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, lines), loop, done)

    builder.position_at_end(done)
    reduce = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(I32, [TOTALS]), "llvm.vector.reduce.add.v8i32"
    )
    for target, vector in zip(targets, updated, strict=True):
        total = builder.call(reduce, [vector])
        builder.store(builder.neg(total) if negate else total, target)


@intrinsic(prefer_literal=True)
def dot_bytes(typingctx, queries, values, row, hidden, query, sums, place):  # type: ignore[no-untyped-def]
    """``sums[query + q, place] = sum_j values[row, j] hidden[query + q, j]`` for ``queries`` of q.

    ``queries`` is a literal integer. ``values`` [V, D] int8, ``hidden`` [N, D] int16, ``sums``
    [N, P] int32, D a multiple of 64, all C-contiguous.
    """
    count = queries.literal_value
    signature = types.void(queries, values, types.intp, hidden, types.intp, sums, types.intp)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, values_value, row_value, hidden_value, query_value, sums_value, place_value = arguments
        weights, width = _matrix(context, builder, values, values_value, row_value)
        first, _ = _matrix(context, builder, hidden, hidden_value, query_value)
        target, sums_width = _matrix(context, builder, sums, sums_value, query_value)
        target = builder.gep(target, [place_value])
        hiddens = _following(builder, first, width, count)

        def body(line: Any, totals: list[Any]) -> list[Any]:
            start = builder.mul(line, I64(LINE))
            _prefetch(builder, weights, start, width)
            columns = [builder.add(start, I64(part)) for part in range(0, LINE, LANES)]
            wide = [builder.sext(_load(builder, weights, c, BYTES, 1), WORDS) for c in columns]
            after = []
            for total, row in zip(totals, hiddens, strict=True):
                words = [_load(builder, row, column, WORDS, 2) for column in columns]
                products = map(partial(_multiply_add, builder), wide, words)
                # Two by two, so that only one addition per line waits for the line before.
                after.append(builder.add(total, _tree(builder, list(products))))
            return after

        targets = _following(builder, target, sums_width, count)
        _sum_lines(builder, builder.udiv(width, I64(LINE)), targets, body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_nibbles(  # type: ignore[no-untyped-def]
    typingctx, queries, nibbles, multipliers, row, hidden, starts, query, sums, place
):
    """``sums[query + q, place] = sum_j multiplier_g(j) nibble_j hidden_j`` of that row and query.

    In blocks of 128 columns, in the order of `kernels.quantize.layout`: ``nibbles`` [V, D / 2]
    uint8, ``multipliers`` [V, D / 32] uint8, ``hidden`` [N, D] int16. ``starts`` [N, D / 16] int32
    is added to the eight sums of every block before they meet their multipliers. Otherwise as
    `dot_bytes`.
    """
    count = queries.literal_value
    index = types.intp
    signature = types.void(queries, nibbles, multipliers, index, hidden, starts, index, sums, index)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        nibbles_value, multipliers_value, row_value = arguments[1:4]
        hidden_value, starts_value, query_value, sums_value, place_value = arguments[4:]
        weights, row_bytes = _matrix(context, builder, nibbles, nibbles_value, row_value)
        factors, _ = _matrix(context, builder, multipliers, multipliers_value, row_value)
        first, width = _matrix(context, builder, hidden, hidden_value, query_value)
        first_start, start_width = _matrix(context, builder, starts, starts_value, query_value)
        target, sums_width = _matrix(context, builder, sums, sums_value, query_value)
        target = builder.gep(target, [place_value])
        hiddens = _following(builder, first, width, count)
        beginnings = _following(builder, first_start, start_width, count)
        four, twelve = (ir.Constant(WORDS, [bits] * LANES) for bits in (4, 12))
        twice = _mask([number // 2 for number in range(SUMS)])  # groups have two sums each

        def body(line: Any, totals: list[Any]) -> list[Any]:
            byte = builder.mul(line, I64(LINE))
            _prefetch(builder, weights, byte, row_bytes)
            column = builder.mul(line, I64(2 * LINE))
            begin = builder.mul(line, I64(SUMS))
            inner = [_load(builder, row, begin, TOTALS, 4) for row in beginnings]
            for step in range(LINE // LANES):
                offset = builder.add(byte, I64(LANES * step))
                both = builder.sext(_load(builder, weights, offset, BYTES, 1), WORDS)
                low = builder.ashr(builder.shl(both, twelve), twelve)
                for part, half in enumerate((low, builder.ashr(both, four))):
                    place = builder.add(column, I64(LANES * (2 * step + part)))
                    words = [_load(builder, row, place, WORDS, 2) for row in hiddens]
                    inner = [
                        builder.add(total, _multiply_add(builder, half, word))
                        for total, word in zip(inner, words, strict=True)
                    ]
            groups = builder.mul(line, I64(4))
            group = _load(builder, factors, groups, ir.VectorType(I8, 4), 1)
            factor = builder.zext(builder.shuffle_vector(group, group, twice), TOTALS)
            # Subtracted, as LLVM splits sums of products in pairs: slower for 32-bit factors.
            return [
                builder.sub(total, builder.mul(part, factor))
                for total, part in zip(totals, inner, strict=True)
            ]

        targets = _following(builder, target, sums_width, count)
        _sum_lines(builder, builder.udiv(row_bytes, I64(LINE)), targets, body, negate=True)
        return context.get_dummy_value()

    return signature, codegen
