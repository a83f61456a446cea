"""Dots of int8 rows with 8-bit hidden states, 64 products per instruction, for numba kernels.

``vpdpbusd`` multiplies unsigned by signed bytes and adds four neighbouring products to a 32-bit
sum. Weights become unsigned by flipping their first bit, which adds 128, so that a sum starts from
``-128 sum_j hidden_j``. Four products stay below 2**17, and sums wrap around: what happens on the
way does not matter as long as the total fits 32 bits, which `Int8Tier.hidden_limit` sees to.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lexshard.kernels.prefetch import request
from lexshard.kernels.processor import has_feature
from lexshard.kernels.screen.tile import (
    I8,
    I32,
    I64,
    LINE,
    following,
    four_totals,
    matrix_row,
)

AVAILABLE = has_feature("avx512vnni")
HEIGHT = 4  # weight rows side by side; with four queries sixteen sums, of 32 registers
_LINE = ir.VectorType(I8, LINE)
_TOTALS = ir.VectorType(I32, LINE // 4)
_FOUR = ir.VectorType(I32, 4)


@intrinsic(prefer_literal=True)
def dot_signed_bytes(  # type: ignore[no-untyped-def]
    typingctx, queries, ahead, values, fetch, row, hidden, starts, query, sums, place
):
    """``sums[query + q, place + r] = starts[query + q] + sum_j (values[row + r, j] + 128)
    hidden[query + q, j]`` modulo 2**32, for four r.

    ``queries``, the number of q, and ``ahead``, how many rows to fetch from row ``fetch`` on, are
    literal integers. ``values`` [V, D] and ``hidden`` [N, D] int8, ``starts`` [N] and ``sums``
    [N, P] int32, D a multiple of 64, all C-contiguous. Needs a processor with these instructions
    (`AVAILABLE`).
    """
    count, fetches = queries.literal_value, ahead.literal_value
    index = types.intp
    signature = types.void(queries, ahead, values, index, index, hidden, starts, index, sums, index)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        values_value, fetch_value, row_value, hidden_value, starts_value = arguments[2:7]
        query_value, sums_value, place_value = arguments[7:]
        fetched, _ = matrix_row(context, builder, values, values_value, fetch_value)
        first_row, width = matrix_row(context, builder, values, values_value, row_value)
        first, _ = matrix_row(context, builder, hidden, hidden_value, query_value)
        target, sums_width = matrix_row(context, builder, sums, sums_value, query_value)
        begin = builder.gep(
            context.make_array(starts)(context, builder, starts_value).data, [query_value]
        )
        weights = following(builder, first_row, width, HEIGHT)
        hiddens = following(builder, first, width, count)
        flip = ir.Constant(_LINE, [-128] * LINE)
        zeros = ir.Constant(_TOTALS, [0] * _TOTALS.count)
        kind = ir.FunctionType(_TOTALS, [_TOTALS] * 3)
        multiply_add = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.x86.avx512.vpdpbusd.512"
        )

        def load(base: Any, column: Any) -> Any:
            address = builder.bitcast(builder.gep(base, [column]), _LINE.as_pointer())
            return builder.load(address, align=1)

        beginnings = []
        for number in range(count):
            start = builder.load(builder.gep(begin, [I64(number)]))
            beginnings += [builder.insert_element(zeros, start, I32(0))] * HEIGHT
        before = builder.block
        loop = builder.append_basic_block("lines")
        done = builder.append_basic_block("lines_done")
        builder.branch(loop)
        builder.position_at_end(loop)
        column = builder.phi(I64)
        column.add_incoming(I64(0), before)
        totals = [builder.phi(_TOTALS) for _ in beginnings]
        for phi, beginning in zip(totals, beginnings, strict=True):
            phi.add_incoming(beginning, before)
        for weight in following(builder, fetched, width, fetches):
            request(builder, builder.gep(weight, [column]))
        unsigned = [
            builder.bitcast(builder.xor(load(weight, column), flip), _TOTALS) for weight in weights
        ]
        signed = [builder.bitcast(load(state, column), _TOTALS) for state in hiddens]
        updated = [
            builder.call(multiply_add, [total, weight, state])
            for total, (state, weight) in zip(totals, product(signed, unsigned), strict=True)
        ]
        next_column = builder.add(column, I64(LINE))
        column.add_incoming(next_column, loop)
        for phi, value in zip(totals, updated, strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", next_column, width), loop, done)

        builder.position_at_end(done)
        for number, there in enumerate(following(builder, target, sums_width, count)):
            four = four_totals(builder, updated[HEIGHT * number : HEIGHT * (number + 1)])
            address = builder.bitcast(builder.gep(there, [place_value]), _FOUR.as_pointer())
            builder.store(four, address, align=4)
        return context.get_dummy_value()

    return signature, codegen
