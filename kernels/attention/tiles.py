"""Register tiles over the blocks of a KV cache: scores of queries, and sums of values.

Blocks lie anywhere: a tile finds them by the table of their sequence, several side by side where
queries are few. Keys and values are float32, or words of two bfloat16: of neighbouring places of a
head's vector in a key, of neighbouring tokens in a value (`kernels.linear.tile`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lexshard.kernels.linear.tile import PANEL, PlainPanels, put_sums, rows_from, sums_of_products
from lexshard.kernels.processor import has_feature

# Where there are registers enough, tiles of so few rows read a block of values from its beginning
# to its end, and ask memory for those of the next one meanwhile. All others ask with the keys.
FEW_ROWS = 2 if has_feature("avx512f") else 0

_INDEX = ir.IntType(64)


def _start(builder: Any, cache: Any, block: Any, head: Any) -> tuple[Any, Any, Any]:
    """Where a head's part of a block begins in ``cache [blocks, Hkv, K, W]`` (contiguous); K, W."""
    _, heads, depth, width = cgutils.unpack_tuple(builder, cache.shape)
    place = builder.mul(builder.add(builder.mul(block, heads), head), builder.mul(depth, width))
    return builder.gep(cache.data, [place]), depth, width


def _block(builder: Any, table: Any, index: Any) -> Any:
    return builder.sext(builder.load(builder.gep(table.data, [index])), _INDEX)


@intrinsic(prefer_literal=True)
def score_tile(  # type: ignore[no-untyped-def]
    typingctx, rows, blocks, queries, query, keys, values, table, index, head, out, row, column
):
    """``out[row + r, column + 16 b + i] = <queries[query + r], key i of block table[index + b]>``.

    ``rows`` and ``blocks``, the numbers of r and b, are literal integers. ``queries [M, K]`` as
    `kernels.linear.operand` makes them, ``keys [blocks, Hkv, K, 16]``, ``table`` int32, ``out``
    float32. May ask memory for the same blocks' ``values``, which are read next.
    """
    count, side_by_side = rows.literal_value, blocks.literal_value
    index_type = types.intp
    signature = types.void(
        rows, blocks, queries, index_type, keys, values, table, index_type, index_type, out,
        index_type, index_type,
    )  # fmt: skip

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        query_value, index_value, head_value = arguments[3], arguments[7], arguments[8]
        row_value, column_value = arguments[10:]
        queries_, keys_, values_, table_, out_ = (
            context.make_array(signature.args[place])(context, builder, arguments[place])
            for place in (2, 4, 5, 6, 9)
        )
        starts, ahead = [], []
        for each in range(side_by_side):
            block = _block(builder, table_, builder.add(index_value, _INDEX(each)))
            start, depth, width = _start(builder, keys_, block, head_value)
            starts.append(start)
            if count > FEW_ROWS:
                ahead.append(_start(builder, values_, block, head_value)[0])
        rows = rows_from(builder, queries_, query_value, _INDEX(0), count)
        panels = PlainPanels(builder, keys.dtype, starts, width, ahead)
        sums = sums_of_products(builder, queries.dtype, rows, panels, depth)
        there = rows_from(builder, out_, row_value, column_value, count)
        put_sums(builder, sums, there, add=False)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def value_tile(  # type: ignore[no-untyped-def]
    typingctx, rows, panels, weights, row, column, values, blocks, head, first, count, panel, out
):
    """``out[row + r, 16 panel ...] += sum_i weights[row + r, column + i] values[first + i]`` over
    ``count`` i, for the panels from ``panel`` on.

    ``rows`` and ``panels``, the number of r and of panels, are literal integers. ``weights [M, K]``
    as `kernels.linear.operand` makes them, ``values [blocks, Hkv, K, D]``, of which one head and
    the first of two ``blocks``; with words of two tokens ``column``, ``first`` and ``count`` are of
    those. ``out`` is float32. May ask memory for as much of the second block.
    """
    height, side_by_side = rows.literal_value, panels.literal_value
    index_type = types.intp
    signature = types.void(
        rows, panels, weights, index_type, index_type, values, blocks, index_type, index_type,
        index_type, index_type, out,
    )  # fmt: skip
    # Where words of two are float32 in the weights, those have two columns for each.
    widened = values.dtype == types.uint32 and weights.dtype == types.float32

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        row_value, column_value = arguments[3], arguments[4]
        blocks_value, head_value, first_value, count_value, panel_value = arguments[6:11]
        weights_, values_, out_ = (
            context.make_array(signature.args[place])(context, builder, arguments[place])
            for place in (2, 5, 11)
        )
        place = builder.mul(panel_value, _INDEX(PANEL))
        starts = []
        for block in cgutils.unpack_tuple(builder, blocks_value):
            start, _, width = _start(builder, values_, block, head_value)
            start = builder.gep(start, [builder.add(builder.mul(first_value, width), place)])
            starts.append([builder.gep(start, [_INDEX(PANEL * n)]) for n in range(side_by_side)])
        own, following = starts
        if widened:
            column_value = builder.shl(column_value, _INDEX(1))
        rows = rows_from(builder, weights_, row_value, column_value, height)
        ahead = following if height <= FEW_ROWS else ()
        panels = PlainPanels(builder, values.dtype, own, width, ahead)
        sums = sums_of_products(builder, weights.dtype, rows, panels, count_value)
        put_sums(builder, sums, rows_from(builder, out_, row_value, place, height), add=True)
        return context.get_dummy_value()

    return signature, codegen
