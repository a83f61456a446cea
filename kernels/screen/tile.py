"""Integer dots of one weight row with a few hidden rows as LLVM vectors, for numba kernels.

Products of 16-bit numbers are added in pairs into 32-bit sums, in the form that LLVM recognises as
one multiply-add instruction (``vpmaddwd`` on x86, or ``vpdpwssd``, which also adds up); sixteen of
them at a time, or thirty-two where the processor has such vectors. Sums wrap around; the caller
keeps the totals inside 32 bits, and then what happens on the way does not matter. One or two weight
rows at a time read memory in order, which measured faster than tiles of several short rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lexshard.kernels.prefetch import request
from lexshard.kernels.processor import has_feature

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
LANES = 32 if has_feature("avx512bw") else 16
SUMS = LANES // 2
ROWS = LANES // 16  # weight rows side by side; more accumulators than two rows have do not fit
# Of int8 rows under several hidden rows: four sums that lie side by side are added up together.
BYTE_ROWS = 4 if SUMS == 16 else ROWS
LINE = 64  # bytes of a cache line: 64 int8, or 128 nibbles
PANEL = 16  # weight rows that callers work on before they move on
BYTES = ir.VectorType(I8, LANES)
WORDS = ir.VectorType(I16, LANES)
PRODUCTS = ir.VectorType(I32, LANES)
TOTALS = ir.VectorType(I32, SUMS)
_FOUR = ir.VectorType(I32, 4)


def _mask(indices: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(indices)), indices)


def _multiply_add(builder: ir.IRBuilder, left: Any, right: Any) -> Any:
    """Sum ``l`` is ``left[2 l] right[2 l] + left[2 l + 1] right[2 l + 1]``."""
    products = builder.mul(builder.sext(left, PRODUCTS), builder.sext(right, PRODUCTS))
    even, odd = (_mask(list(range(parity, LANES, 2))) for parity in (0, 1))
    pairs = [builder.shuffle_vector(products, products, mask) for mask in (even, odd)]
    return builder.add(*pairs)


def _load(builder: ir.IRBuilder, base: Any, offset: Any, vector: ir.VectorType, align: int) -> Any:
    address = builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())
    return builder.load(address, align=align)


def _prefetch_ahead(builder: ir.IRBuilder, row: Any, offset: Any, width: Any) -> None:
    """Fetches the line at ``offset`` of the row one panel further on."""
    ahead = builder.gep(row, [builder.add(offset, builder.mul(width, I64(PANEL)))])
    request(builder, ahead)


def matrix_row(
    context: Any, builder: Any, matrix_type: Any, value: Any, row: Any
) -> tuple[Any, Any]:
    """A pointer to a row of a C-contiguous matrix, and its width."""
    matrix = context.make_array(matrix_type)(context, builder, value)
    width = cgutils.unpack_tuple(builder, matrix.shape)[1]
    return builder.gep(matrix.data, [builder.mul(row, width)]), width


def following(builder: ir.IRBuilder, first: Any, width: Any, count: int) -> list[Any]:
    """Pointers to ``count`` rows from ``first`` on."""
    return [builder.gep(first, [builder.mul(width, I64(row))]) for row in range(count)]


def _places(builder: ir.IRBuilder, first: Any, width: Any, count: int, height: int) -> list[Any]:
    """Pointers to ``height`` neighbours in each of ``count`` rows."""
    rows = following(builder, first, width, count)
    return [builder.gep(row, [I64(place)]) for row, place in product(rows, range(height))]


def _fold(builder: ir.IRBuilder, left: Any, right: Any, *masks: list[int]) -> Any:
    return builder.add(*(builder.shuffle_vector(left, right, _mask(mask)) for mask in masks))


def four_totals(builder: ir.IRBuilder, sums: list[Any]) -> Any:
    """The totals of four vectors of sixteen: one transpose instead of four reductions."""
    lanes = range(0, 16, 4)  # of 128 bits, which no shuffle crosses before they are added up
    low = [lane + place for lane in lanes for place in (0, 16, 1, 17)]
    high = [index + 2 for index in low]
    pairs = [_fold(builder, *sums[first : first + 2], low, high) for first in (0, 2)]
    even = [lane + place for lane in lanes for place in (0, 1, 16, 17)]
    odd = [index + 2 for index in even]
    quads = _fold(builder, *pairs, even, odd)
    for width in (8, 4):
        parts = [list(range(first, first + width)) for first in (0, width)]
        quads = _fold(builder, quads, quads, *parts)
    return quads


def _sum_lines(
    builder: ir.IRBuilder,
    lines: Any,
    targets: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    *,
    negate: bool = False,
    by_four: bool = False,
) -> None:
    """Runs ``body(line, sums) -> sums`` for all lines (at least 1), a vector of sums per target,
    and stores the total of each, or its negative. Of ``by_four``, targets lie four by four."""
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
    for first in range(0, len(targets), 4) if by_four else ():
        totals = four_totals(builder, updated[first : first + 4])
        address = builder.bitcast(targets[first], _FOUR.as_pointer())
        builder.store(builder.neg(totals) if negate else totals, address, align=4)
    if by_four:
        return
    reduce = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(I32, [TOTALS]), f"llvm.vector.reduce.add.v{SUMS}i32"
    )
    for target, vector in zip(targets, updated, strict=True):
        total = builder.call(reduce, [vector])
        builder.store(builder.neg(total) if negate else total, target)


@intrinsic
def fetch_row(typingctx, matrix, row):  # type: ignore[no-untyped-def]
    """Starts to fetch row ``row`` of ``matrix`` [R, D] of bytes, C-contiguous."""
    signature = types.void(matrix, types.intp)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        start, width = matrix_row(context, builder, matrix, *arguments)
        with cgutils.for_range_slice(builder, I64(0), width, I64(LINE)) as (offset, _):
            request(builder, builder.gep(start, [offset]), 2)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_bytes(  # type: ignore[no-untyped-def]
    typingctx, queries, rows, ahead, values, row, hidden, query, sums, place
):
    """``sums[query + q, place + r] = sum_j values[row + r, j] hidden[query + q, j]``.

    ``queries`` and ``rows``, the numbers of q and r, and ``ahead`` (1: fetch the following panel)
    are literal integers. ``values`` [V, D] int8, ``hidden`` [N, D] int16, ``sums`` [N, P] int32, D
    a multiple of 64, all C-contiguous.
    """
    count, height, fetches = (kind.literal_value for kind in (queries, rows, ahead))
    index = types.intp
    signature = types.void(queries, rows, ahead, values, index, hidden, index, sums, index)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values_value, row_value, hidden_value, query_value, sums_value, place_value = arguments[3:]
        first_row, width = matrix_row(context, builder, values, values_value, row_value)
        first, _ = matrix_row(context, builder, hidden, hidden_value, query_value)
        weights = following(builder, first_row, width, height)
        hiddens = following(builder, first, width, count)

        def body(line: Any, totals: list[Any]) -> list[Any]:
            start = builder.mul(line, I64(LINE))
            for weight in weights if fetches else ():
                _prefetch_ahead(builder, weight, start, width)
            totals = list(totals)
            for part in range(0, LINE, LANES):
                column = builder.add(start, I64(part))
                wide = [builder.sext(_load(builder, w, column, BYTES, 1), WORDS) for w in weights]
                words = [_load(builder, state, column, WORDS, 2) for state in hiddens]
                for number, (word, weight) in enumerate(product(words, wide)):
                    added = _multiply_add(builder, weight, word)
                    totals[number] = builder.add(totals[number], added)
            return totals

        target, sums_width = matrix_row(context, builder, sums, sums_value, query_value)
        target = builder.gep(target, [place_value])
        targets = _places(builder, target, sums_width, count, height)
        lines = builder.udiv(width, I64(LINE))
        _sum_lines(builder, lines, targets, body, by_four=height == 4 and SUMS == 16)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_nibbles(  # type: ignore[no-untyped-def]
    typingctx, queries, rows, ahead, nibbles, factors, row, hidden, starts, query, sums, place
):
    """``sums[query + q, place + r] = sum_j factor_g(j) nibble_j hidden_j`` of row + r, query + q.

    In blocks of 128 columns, in the orders of `kernels.quantize.layout`: ``nibbles`` [V, D / 2]
    uint8, ``factors`` [V, D / 32] uint8, ``hidden`` [N, D] int16. ``starts`` [N, D / 16] int32
    is added to the eight sums of every block before they meet their factors. Otherwise as
    `dot_bytes`.
    """
    count, height, fetches = (kind.literal_value for kind in (queries, rows, ahead))
    index = types.intp
    signature = types.void(
        queries, rows, ahead, nibbles, factors, index, hidden, starts, index, sums, index
    )

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        nibbles_value, factors_value, row_value = arguments[3:6]
        hidden_value, starts_value, query_value, sums_value, place_value = arguments[6:]
        first_row, row_bytes = matrix_row(context, builder, nibbles, nibbles_value, row_value)
        factor, groups = matrix_row(context, builder, factors, factors_value, row_value)
        first, width = matrix_row(context, builder, hidden, hidden_value, query_value)
        first_start, start_width = matrix_row(context, builder, starts, starts_value, query_value)
        weights = following(builder, first_row, row_bytes, height)
        factors_of = following(builder, factor, groups, height)
        hiddens = following(builder, first, width, count)
        beginnings = following(builder, first_start, start_width, count)
        four, twelve = (ir.Constant(WORDS, [bits] * LANES) for bits in (4, 12))
        # Eight sums of a block, two for every group; wider vectors hold two sets of them.
        twice = _mask([number % 8 // 2 for number in range(SUMS)])
        begins = ir.VectorType(I32, 8)
        widen = _mask([min(number, 8) for number in range(SUMS)])  # zero beyond the first eight

        def body(line: Any, totals: list[Any]) -> list[Any]:
            byte = builder.mul(line, I64(LINE))
            for weight in weights if fetches else ():
                _prefetch_ahead(builder, weight, byte, row_bytes)
            column = builder.mul(line, I64(2 * LINE))
            begin = builder.mul(line, I64(8))
            inner = []
            for state in beginnings:
                start = _load(builder, state, begin, begins, 4)
                zeros = ir.Constant(begins, [0] * 8)
                inner += [builder.shuffle_vector(start, zeros, widen)] * height
            for first_byte in range(0, LINE, LANES):
                offset = builder.add(byte, I64(first_byte))
                both = [builder.sext(_load(builder, w, offset, BYTES, 1), WORDS) for w in weights]
                low = [builder.ashr(builder.shl(wide, twelve), twelve) for wide in both]
                high = [builder.ashr(wide, four) for wide in both]
                for part, half in enumerate((low, high)):
                    word_place = 2 * first_byte - first_byte % 32 + 32 * part
                    place = builder.add(column, I64(word_place))
                    words = [_load(builder, state, place, WORDS, 2) for state in hiddens]
                    for number, (word, weight) in enumerate(product(words, half)):
                        added = _multiply_add(builder, weight, word)
                        inner[number] = builder.add(inner[number], added)
            group_place = builder.mul(line, I64(4))
            four_groups = ir.VectorType(I8, 4)
            group = [_load(builder, row, group_place, four_groups, 1) for row in factors_of]
            factor = [builder.zext(builder.shuffle_vector(g, g, twice), TOTALS) for g in group]
            # Subtracted, as LLVM splits sums of products in pairs: slower for 32-bit factors.
            return [
                builder.sub(total, builder.mul(part, factor[number % height]))
                for number, (total, part) in enumerate(zip(totals, inner, strict=True))
            ]

        target, sums_width = matrix_row(context, builder, sums, sums_value, query_value)
        target = builder.gep(target, [place_value])
        targets = _places(builder, target, sums_width, count, height)
        lines = builder.udiv(row_bytes, I64(LINE))
        _sum_lines(builder, lines, targets, body, negate=True)
        return context.get_dummy_value()

    return signature, codegen
