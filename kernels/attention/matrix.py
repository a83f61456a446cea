"""Attention over words of two bfloat16 by matrices: the order of `kernels.linear.matrix`.

A score is a sum over the head's columns in that order. A value is one over the keys, a block of 16
at a time: of its even and its odd keys two chains, which are added, then added to the sum of the
blocks before. What a row does not see of its blocks has no weight; of the last one, keys that are
no token of this run are taken for zero, since an earlier owner may have left anything there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.attention.softmax import weigh
from lexshard.kernels.copies import copy_into
from lexshard.kernels.linear.matrix import (
    CONFIGURATIONS,
    MATRIX,
    MOST_ROWS,
    PAIRS,
    add_columns,
    call,
    configurations,
    configure,
    products,
    release,
    values_of,
)
from lexshard.kernels.linear.operand import operand
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.processor import multiplies_matrices

Array = npt.NDArray[Any]

_WORDS = BLOCK_SIZE // 2  # of a block's keys
_OF_BLOCKS = configurations(_WORDS)
_BYTE, _INDEX = ir.IntType(8), ir.IntType(64)
_ADDRESS = _BYTE.as_pointer()
_ZERO: Any = np.int64(0)
_NONE, _LOWER = np.uint32(0), np.uint32(0xFFFF)


@njit(nogil=True, cache=True)
def _score(
    queries: Array,
    query: int,
    members: int,
    keys: Array,
    table: Array,
    first: int,
    last: int,
    low: int,
    high: int,
    out: Array,
) -> None:
    """Products of ``members`` queries for each of the heads ``low`` to ``high - 1``, from ``query``
    on, with the keys of the blocks ``first`` to ``last`` of a table: ``out [members (high - low),
    16 blocks]``."""
    heads = keys.shape[1]
    panels = keys.reshape(keys.shape[0] * heads, keys.shape[2], PANEL)
    blocks, most = last + 1 - first, min(members, MOST_ROWS)
    configured, row = _ZERO, _ZERO
    while row < members * (high - low):  # up to the end of a head
        head, count = low + row // members, min(most, members - row % members)
        if count != configured:
            configure(CONFIGURATIONS, count - 1)
            configured = count
        wide, index = 4 if count <= MATRIX else 2, _ZERO
        while index < blocks:
            place = min(index, blocks - wide) if blocks >= wide else index  # some once more
            column, at, from_row = place * BLOCK_SIZE, first + place, query + row
            one = np.int64(table[at]) * heads + head
            if blocks < wide:
                if count <= MATRIX:
                    products(1, 1, 0, queries, from_row, panels, one, out, row, column)
                else:
                    products(2, 1, 0, queries, from_row, panels, one, out, row, column)
                index += 1
            else:
                two = np.int64(table[at + 1]) * heads + head
                if count > MATRIX:
                    both = (one, two)
                    products(2, 2, 0, queries, from_row, panels, both, out, row, column)
                else:
                    three = np.int64(table[at + 2]) * heads + head
                    four = np.int64(table[at + 3]) * heads + head
                    every = (one, two, three, four)
                    products(1, 4, 0, queries, from_row, panels, every, out, row, column)
                index = place + wide
        row += count
    release()


@intrinsic(prefer_literal=True)
def _add_blocks(
    typing_context: Any,
    groups: Any,
    panels: Any,
    weights: Any,
    row: Any,
    values: Any,
    table: Any,
    first: Any,
    last: Any,
    head: Any,
    end: Any,
    panel: Any,
    out: Any,
) -> Any:
    """``out[row + r, 16 panel ...]`` becomes the sum over blocks ``first`` to ``last`` of a table,
    the last of which is in ``end [8, D]``.

    ``groups`` of up to `MATRIX` rows and ``panels`` side by side are literal integers. ``weights
    [M, 8 blocks]`` and ``values [blocks, Hkv, 8, D]`` are words.
    """
    tall, wide = range(groups.literal_value), range(panels.literal_value)

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row_value, first_value, last_value, head_value, panel_value = (
            arguments[place] for place in (3, 6, 7, 8, 10)
        )
        weights_, values_, table_, end_, out_ = (
            context.make_array(signature.args[place])(context, builder, arguments[place])
            for place in (2, 4, 5, 9, 11)
        )

        def lines(array: Any, column: Any) -> tuple[list[Any], Any]:
            """Where 16 rows of each group begin, and how far apart they are."""
            stride = cgutils.unpack_tuple(builder, array.strides)[0]
            base = builder.bitcast(array.data, _ADDRESS)
            starts = []
            for each in tall:
                place = builder.mul(builder.add(row_value, _INDEX(MATRIX * each)), stride)
                starts.append(builder.gep(base, [builder.add(place, column)]))
            return starts, stride

        _, heads, _, width = cgutils.unpack_tuple(builder, values_.shape)
        line = builder.mul(width, _INDEX(4))
        part = builder.mul(line, _INDEX(_WORDS))
        from_panel = builder.mul(panel_value, _INDEX(4 * PANEL))
        own, weights_stride = lines(weights_, _INDEX(0))
        there, out_stride = lines(out_, from_panel)
        base = builder.bitcast(values_.data, _ADDRESS)
        left_over = builder.bitcast(end_.data, _ADDRESS)
        sums = {(a, b): _BYTE(2 * a + b) for a in tall for b in wide}
        for each in sums.values():
            call(builder, "tilezero", each)
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("blocks", "blocks_done"))
        builder.branch(loop)
        builder.position_at_end(loop)
        block = builder.phi(_INDEX)
        block.add_incoming(first_value, before)
        number = builder.sext(builder.load(builder.gep(table_.data, [block])), _INDEX)
        number = builder.add(builder.mul(number, heads), head_value)
        start = builder.gep(base, [builder.mul(number, part)])
        start = builder.select(builder.icmp_signed("==", block, last_value), left_over, start)
        start = builder.gep(start, [from_panel])
        column = builder.mul(builder.sub(block, first_value), _INDEX(4 * _WORDS))
        for a in tall:
            place = builder.gep(own[a], [column])
            call(builder, "tileloadd64", _BYTE(4 + a), place, weights_stride)
        free = 8 - 4 - len(tall)
        for b in wide:
            register = _BYTE(4 + len(tall) + b % free)
            place = builder.gep(start, [_INDEX(4 * PANEL * b)])
            call(builder, "tileloadd64", register, place, line)
            for a in tall:
                call(builder, "tdpbf16ps", sums[a, b], _BYTE(4 + a), register)
        following = builder.add(block, _INDEX(1))
        block.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<=", following, last_value), loop, done)
        builder.position_at_end(done)
        for (a, b), register in sums.items():
            place = builder.gep(there[a], [_INDEX(4 * PANEL * b)])
            call(builder, "tilestored64", register, place, out_stride)
        return context.get_dummy_value()

    index = types.intp
    signature = types.void(
        groups, panels, weights, index, values, table, index, index, index, end, index, out
    )
    return signature, code_generator


@njit(nogil=True, cache=True)
def _sum_values(
    weights: Array,
    members: int,
    values: Array,
    table: Array,
    first: int,
    last: int,
    low: int,
    ends: Array,
    out: Array,
) -> None:
    """``out`` becomes what ``weights``, of ``members`` rows for each head from ``low`` on, make of
    the blocks ``first`` to ``last``, the last of which is in ``ends [heads, 8, D]``."""
    panels, most = out.shape[1] // PANEL, min(members, MOST_ROWS)
    configured, row = _ZERO, _ZERO
    while row < members * ends.shape[0]:
        number, count = row // members, min(most, members - row % members)
        head, end = low + number, ends[number]
        if count != configured:
            configure(_OF_BLOCKS, count - 1)
            configured = count
        panel = _ZERO
        while panel < panels:
            if count > MATRIX:
                _add_blocks(2, 2, weights, row, values, table, first, last, head, end, panel, out)
                panel += 2
            elif panels - panel >= 4:
                _add_blocks(1, 4, weights, row, values, table, first, last, head, end, panel, out)
                panel += 4
            else:
                _add_blocks(1, 2, weights, row, values, table, first, last, head, end, panel, out)
                panel += 2
        row += count
    release()


@njit(nogil=True, cache=True)
def _score_in_vectors(
    queries: Array,
    query: int,
    members: int,
    keys: Array,
    table: Array,
    first: int,
    last: int,
    low: int,
    high: int,
    out: Array,
) -> None:
    """`_score` on any processor."""
    depth, sums = keys.shape[2], np.empty((members, PANEL), np.float32)
    for head in range(low, high):
        row = members * (head - low)
        own = values_of(queries[query + row : query + row + members], depth)
        for index in range(first, last + 1):
            sums[:] = 0.0
            for pair in range(0, depth, PAIRS):
                words = keys[table[index], head, pair : pair + PAIRS]
                add_columns(own[:, 2 * pair : 2 * (pair + PAIRS)], words, sums)
            column = (index - first) * BLOCK_SIZE
            out[row : row + members, column : column + BLOCK_SIZE] = sums


@njit(nogil=True, cache=True)
def _sum_values_in_vectors(
    weights: Array,
    members: int,
    values: Array,
    table: Array,
    first: int,
    last: int,
    low: int,
    ends: Array,
    out: Array,
) -> None:
    """`_sum_values` on any processor."""
    words, sums = _WORDS * (last + 1 - first), np.empty((members, PANEL), np.float32)
    for number in range(ends.shape[0]):
        row = members * number
        own = values_of(weights[row : row + members], words)
        for column in range(0, out.shape[1], PANEL):
            sums[:] = 0.0
            for index in range(first, last + 1):
                block = ends[number] if index == last else values[table[index], low + number]
                place = (index - first) * BLOCK_SIZE
                part = block[:, column : column + PANEL]
                add_columns(own[:, place : place + BLOCK_SIZE], part, sums)
            out[row : row + members, column : column + PANEL] = sums


_scores = _score if multiplies_matrices() else _score_in_vectors
_value_sums = _sum_values if multiplies_matrices() else _sum_values_in_vectors


@njit(nogil=True, cache=True)
def _ends_of(values: Array, block: int, low: int, high: int, keys: int) -> Array:
    """The values of a block for the heads ``low`` to ``high - 1``, zero from key ``keys`` on."""
    out = np.empty((high - low, _WORDS, values.shape[3]), np.uint32)
    for head in range(low, high):
        for word in range(_WORDS):
            own, there = values[block, head, word], out[head - low, word]
            if 2 * word + 1 < keys:
                copy_into(there, own)
            else:
                kept = _LOWER if 2 * word < keys else _NONE
                for j in range(own.shape[0]):
                    there[j] = own[j] & kept
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def attend_by_matrices(
    queries: Array,
    query: int,
    members: int,
    group: int,
    keys: Array,
    values: Array,
    table: Array,
    first_block: int,
    last_block: int,
    low: int,
    high: int,
    start: int,
    stop: int,
    factor: np.float32,
    cap: np.float32,
    scores: Array,
    totals: Array,
    lanes: Array,
    sums: Array,
) -> None:
    """`kernels.attention.by_tiles.attend_by_tiles` of heads whose width is a multiple of 32."""
    _scores(queries, query, members, keys, table, first_block, last_block, low, high, scores)
    weigh(scores, members, group, first_block, start, stop, factor, cap, totals, lanes)
    weights = operand(scores, values, scores.shape[1] // 2)
    last = stop + (members - 1) // group - 1
    ends = _ends_of(values, np.int64(table[last_block]), low, high, last % BLOCK_SIZE + 1)
    _value_sums(weights, members, values, table, first_block, last_block, low, ends, sums)
