"""Products of bfloat16 as processors with AMX compute them: matrices of 16 rows and 16 outputs,
over 32 columns at a time.

Of every 32 columns the products of the first, third, fifth ... are one chain of fused
multiply-adds, those of the others a second one; both chains start at zero, and what they come to
is added, then added to the sum of the columns before. That is an output's order whatever rows and
outputs are beside it. `multiply_in_vectors` gives the same bits on any processor (unless a sum is
below the normal numbers, which AMX takes for zero).

Intel, *Architecture Instruction Set Extensions*, TDPBF16PS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.prefetch import request

PAIRS = 16  # pairs of columns that are multiplied together
MATRIX = 16  # rows of a register
MOST_ROWS = 2 * MATRIX  # that are computed together
ROW_BLOCK = 256  # rows whose activations stay in the second-level cache while panels stream by
_PANELS_OF_FEW, _PANELS_OF_MANY = 4, 2  # side by side of up to MATRIX rows, and of more
_LINE = 64  # bytes of a register's row
_REGISTERS = 8
_FIRST_OPERAND = 4  # the registers before hold sums

_BYTE, _INDEX, _NOTHING = ir.IntType(8), ir.IntType(64), ir.VoidType()
_ADDRESS = _BYTE.as_pointer()
_HALF, _UPPER = np.uint32(16), np.uint32(0xFFFF0000)
_ZERO = np.int64(0)


def configurations(pairs: int) -> npt.NDArray[np.uint8]:
    """Of 1 to `MOST_ROWS` rows what the registers are to hold, in the processor's words: sums of
    the first `MATRIX` rows, of more also those of the second; rows, and weights, of ``pairs``."""
    every = np.zeros((MOST_ROWS, 64), np.uint8)
    for more, one in enumerate(every):
        first, second = min(more + 1, MATRIX), more + 1 - MATRIX
        rows = [first, first, first, first, first, pairs, pairs, pairs]
        if second > 0:
            rows = [first, first, second, second, first, second, pairs, pairs]
        bytes_ = one[16 : 16 + 2 * _REGISTERS].view(np.uint16)
        bytes_[:] = _LINE
        bytes_[_FIRST_OPERAND : _FIRST_OPERAND + (2 if second > 0 else 1)] = 4 * pairs
        one[0] = 1  # of the table's layout
        one[48 : 48 + _REGISTERS] = rows
    return every


CONFIGURATIONS = configurations(PAIRS)


def call(builder: Any, name: str, *arguments: Any) -> None:
    """Emits an instruction of x86 that gives nothing."""
    kind = ir.FunctionType(_NOTHING, [each.type for each in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, arguments)


@intrinsic
def configure(typing_context: Any, table: Any, number: Any) -> Any:
    """Makes the registers what ``table[number]`` of `configurations` says, until `release`."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(table)(context, builder, arguments[0])
        start = builder.gep(array.data, [builder.mul(arguments[1], _INDEX(64))])
        call(builder, "ldtilecfg", builder.bitcast(start, _ADDRESS))
        return context.get_dummy_value()

    return types.void(table, types.intp), code_generator


@intrinsic
def release(typing_context: Any) -> Any:
    """What a thread has in the registers is kept for it whenever it waits, until this."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), code_generator


@intrinsic(prefer_literal=True)
def products(
    typing_context: Any,
    groups: Any,
    panels: Any,
    fetch: Any,
    x: Any,
    row: Any,
    weight: Any,
    panel: Any,
    out: Any,
    out_row: Any,
    out_column: Any,
) -> Any:
    """Of the rows from ``row`` of ``x`` on, in one or two ``groups`` of up to `MATRIX`, and of some
    panels from ``panel`` on, or those of the numbers in ``panel``, a tuple, stored from
    ``out[out_row, out_column]`` on, after `configure`.

    ``groups``, ``panels`` and ``fetch`` (1: as many rows behind these are asked of memory) are
    literal integers. Words are two bfloat16 each where ``out`` is float32, and four signed bytes
    where it is int32."""
    multiply = "tdpbf16ps" if out.dtype == types.float32 else "tdpbssd"
    group_count, panel_count = groups.literal_value, panels.literal_value
    first_weight = _FIRST_OPERAND + group_count
    weights = _REGISTERS - first_weight

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, x_value, x_row, weight_value, first, out_value, to_row, to_column = arguments

        def open_array(kind: Any, value: Any) -> tuple[Any, Any]:
            array = context.make_array(kind)(context, builder, value)
            stride = cgutils.unpack_tuple(builder, array.strides)[0]
            return builder.bitcast(array.data, _ADDRESS), stride

        def place(base: Any, *terms: tuple[Any, Any]) -> Any:
            for count, size in terms:
                base = builder.gep(base, [builder.mul(count, size)])
            return base

        x_base, x_stride = open_array(x, x_value)
        weight_base, panel_stride = open_array(weight, weight_value)
        out_base, out_stride = open_array(out, out_value)
        depth = builder.udiv(panel_stride, _INDEX(_LINE))
        tall = range(group_count)
        wide = range(panel_count)
        row_places = [
            place(x_base, (builder.add(x_row, _INDEX(MATRIX * each)), x_stride)) for each in tall
        ]
        if isinstance(panel, types.UniTuple):
            numbers = cgutils.unpack_tuple(builder, first)
        else:
            numbers = [builder.add(first, _INDEX(each)) for each in wide]
        panel_places = [place(weight_base, (each, panel_stride)) for each in numbers]
        sums = {(a, b): _BYTE(2 * a + b) for a in tall for b in wide}
        for each in sums.values():
            call(builder, "tilezero", each)
        before = builder.block
        loop, done = (builder.append_basic_block(name) for name in ("columns", "columns_done"))
        builder.branch(loop)
        builder.position_at_end(loop)
        pair = builder.phi(_INDEX)
        pair.add_incoming(_INDEX(0), before)
        for each in range(MATRIX * group_count if fetch.literal_value else 0):
            ahead = builder.add(x_row, _INDEX(MATRIX * group_count + each))
            request(builder, place(x_base, (ahead, x_stride), (pair, _INDEX(4))), 2)
        for a in tall:
            start = place(row_places[a], (pair, _INDEX(4)))
            call(builder, "tileloadd64", _BYTE(_FIRST_OPERAND + a), start, x_stride)
        for b in wide:
            register = _BYTE(first_weight + b % weights)
            start = place(panel_places[b], (pair, _INDEX(_LINE)))
            call(builder, "tileloadd64", register, start, _INDEX(_LINE))
            for a in tall:
                call(builder, multiply, sums[a, b], _BYTE(_FIRST_OPERAND + a), register)
        following = builder.add(pair, _INDEX(PAIRS))
        pair.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
        builder.position_at_end(done)
        for (a, b), register in sums.items():
            there = place(
                out_base,
                (builder.add(to_row, _INDEX(MATRIX * a)), out_stride),
                (to_column, _INDEX(4)),
                (_INDEX(b), _INDEX(4 * PANEL)),
            )
            call(builder, "tilestored64", register, there, out_stride)
        return context.get_dummy_value()

    index = types.intp
    which = panel if isinstance(panel, types.UniTuple) else index
    signature = types.void(groups, panels, fetch, x, index, weight, which, out, index, index)
    return signature, code_generator


@njit(nogil=True, cache=True)
def _add(
    sums: npt.NDArray[Any], rows: int, columns: int, out: npt.NDArray[Any], row: int, column: int
) -> None:
    for each in range(rows):
        own, there = sums[each], out[row + each, column : column + columns]
        for j in range(columns):
            there[j] += own[j]


@njit(nogil=True, cache=True)
def _multiply_rows(
    x: npt.NDArray[Any],
    start: int,
    stop: int,
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    sums: npt.NDArray[Any],
    first: int,
    last: int,
) -> None:
    """Of the rows ``start`` to ``stop - 1``: up to `MOST_ROWS`, or a multiple of them."""
    count = min(stop - start, MOST_ROWS)
    configure(CONFIGURATIONS, count - 1)
    panel = first
    while panel < last:
        wide = _PANELS_OF_FEW if count <= MATRIX else _PANELS_OF_MANY
        wide = wide if panel + wide <= last else 1
        for row in range(start, stop, MOST_ROWS):
            target, to_row, column = (sums, _ZERO, _ZERO) if add else (out, row, panel * PANEL)
            if count > MATRIX and wide > 1:
                products(2, 2, 0, x, row, weight, panel, target, to_row, column)
            elif count > MATRIX:
                products(2, 1, 0, x, row, weight, panel, target, to_row, column)
            elif wide > 1:
                products(1, 4, 0, x, row, weight, panel, target, to_row, column)
            else:
                products(1, 1, 0, x, row, weight, panel, target, to_row, column)
            if add:
                _add(sums, count, wide * PANEL, out, row, panel * PANEL)
        panel += wide


@njit(nogil=True, cache=True)
def multiply_matrices(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> None:
    """Products with the panels ``first`` to ``last - 1``, with AMX: ``x [T, pairs] uint32``,
    ``weight [P, pairs, 16] uint32``, a multiple of `PAIRS`, ``out [>= T, >= P * 16] float32``."""
    rows = x.shape[0]
    sums = np.empty((MOST_ROWS if add else 0, _PANELS_OF_FEW * PANEL), np.float32)
    for start in range(0, rows, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, rows)
        whole = stop - (stop - start) % MOST_ROWS
        if whole > start:
            _multiply_rows(x, start, whole, weight, out, add, sums, first, last)
        if stop > whole:
            _multiply_rows(x, whole, stop, weight, out, add, sums, first, last)
    release()


@njit(nogil=True, cache=True)
def values_of(x: npt.NDArray[Any], pairs: int) -> npt.NDArray[np.float32]:
    """What `kernels.linear.operand` gives, as float32 ``[T, 2 pairs]``: words, or already so."""
    bits = x.view(np.uint32)
    out = np.empty((x.shape[0], 2 * pairs), np.uint32)
    for row in range(x.shape[0]):
        for pair in range(pairs):
            if bits.shape[1] == pairs:
                out[row, 2 * pair] = bits[row, pair] << _HALF
                out[row, 2 * pair + 1] = bits[row, pair] & _UPPER
            else:
                out[row, 2 * pair] = bits[row, 2 * pair]
                out[row, 2 * pair + 1] = bits[row, 2 * pair + 1]
    return out.view(np.float32)


@njit(nogil=True, cache=True)
def add_columns(
    values: npt.NDArray[np.float32], words: npt.NDArray[np.uint32], sums: npt.NDArray[np.float32]
) -> None:
    """What an instruction for matrices adds to ``sums [T, 16]``: ``values [T, 2 pairs]`` of
    bfloat16 times ``words [pairs, 16]``. A product of two bfloat16 is exact, so that adding it is a
    fused multiply-add."""
    pairs = words.shape[0]
    bits = np.empty((2 * pairs, PANEL), np.uint32)
    for pair in range(pairs):
        for j in range(PANEL):
            bits[2 * pair, j] = words[pair, j] << _HALF
            bits[2 * pair + 1, j] = words[pair, j] & _UPPER
    columns = bits.view(np.float32)
    chains = np.empty((2, PANEL), np.float32)
    for row in range(values.shape[0]):
        chains[:] = 0.0
        for column in range(2 * pairs):
            value, own, chain = values[row, column], columns[column], chains[column % 2]
            for j in range(PANEL):
                chain[j] += value * own[j]
        for j in range(PANEL):
            sums[row, j] += chains[0, j] + chains[1, j]


@njit(nogil=True, cache=True)
def multiply_in_vectors(
    x: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    out: npt.NDArray[Any],
    add: bool,
    first: int,
    last: int,
) -> None:
    """`multiply_matrices` of bfloat16 without AMX; ``x`` may also be float32 with values of it,
    ``[T, 2 pairs]``."""
    rows, pairs = x.shape[0], weight.shape[1]
    values, sums = values_of(x, pairs), np.empty((rows, PANEL), np.float32)
    for panel in range(first, last):
        sums[:] = 0.0
        for begin in range(0, pairs, PAIRS):
            own = values[:, 2 * begin : 2 * (begin + PAIRS)]
            add_columns(own, weight[panel, begin : begin + PAIRS], sums)
        for row in range(rows):
            there = out[row, panel * PANEL : (panel + 1) * PANEL]
            for j in range(PANEL):
                there[j] = there[j] + sums[row, j] if add else sums[row, j]
