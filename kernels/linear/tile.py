"""Register tiles of the row kernel, as LLVM vectors inside numba.

numba's own loops cannot keep a block of accumulators in registers, so the innermost tile is
written in LLVM's intermediate language: ``rows x (panels * 16)`` outputs, each one a chain of
fused multiply-adds over the columns of the weight. A chain does not know how many rows or panels
its tile has: that is what makes the result of a row independent of its batch.

Columns come in ascending order but in pairs of bfloat16, of which the second is added first: so
``vdpbf16ps`` does it, with a rounding after each, and two fused multiply-adds without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lexshard.kernels.linear.compact import WORDS_OF_UNIT
from lexshard.kernels.linear.compact_panels import CompactPanels
from lexshard.kernels.prefetch import request
from lexshard.kernels.processor import has_feature

# Two products of bfloat16 in one instruction; LLVM knows it by these types from version 16 on.
MULTIPLIES_PAIRS = has_feature("avx512bf16") and binding.llvm_version_info[0] >= 16
PANEL = 16  # outputs side by side in one panel of packed weights: two AVX2 or one AVX-512 vector

_FLOAT = ir.FloatType()
_WORD_BYTES = 4
_VECTOR = ir.VectorType(_FLOAT, PANEL)
_HALF_VECTOR = ir.VectorType(ir.IntType(16), PANEL)
_WORD_VECTOR = ir.VectorType(ir.IntType(32), PANEL)
_LANE = ir.IntType(32)


class _BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRED = (types.uint32, types.uint8)  # weights that are words of two
_PAIRS_VECTOR = ir.VectorType(_BFloat16(), 2 * PANEL)


def _splat(builder: Any, scalar: Any) -> Any:
    """A vector whose every lane is ``scalar``, a float32 or a word."""
    undefined = ir.Constant(ir.VectorType(scalar.type, PANEL), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _LANE(0))
    zeros = ir.Constant(ir.VectorType(_LANE, PANEL), [0] * PANEL)
    return builder.shuffle_vector(first, undefined, zeros)


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=align)


def _factors_of(builder: Any, words: Any, multiplies_pairs: bool) -> list[Any]:
    """Of words of two bfloat16 what is multiplied, in the order in which it is added. bfloat16 is
    the upper half of a float32, so a shift widens it."""
    if multiplies_pairs:
        return [builder.bitcast(words, _PAIRS_VECTOR)]
    half = ir.Constant(_WORD_VECTOR, [16] * PANEL)
    second = builder.and_(words, ir.Constant(_WORD_VECTOR, [0xFFFF0000] * PANEL))
    return [builder.bitcast(each, _VECTOR) for each in (second, builder.shl(words, half))]


class PlainPanels:
    """Emits the loads of panels side by side, column after column, as `CompactPanels` does.

    ``panels`` and ``ahead`` point to the first weights of a column, of which the next column is
    ``step`` weights further. What ``ahead`` points to is asked of memory, the line of each column.
    """

    columns_at_once = 1

    def __init__(
        self, builder: Any, kind: Any, panels: Sequence[Any], step: Any, ahead: Sequence[Any] = ()
    ) -> None:
        self.count, self.kind = len(panels), kind
        self._builder, self._panels, self._step, self._ahead = builder, panels, step, ahead

    def begin(self) -> None:
        """At the head of the loop."""

    def read(self, column: Any) -> list[list[Any]]:
        """Of every panel the weights of a column, in a vector."""
        builder = self._builder
        place = builder.mul(column, self._step)
        for each in self._ahead:
            line = builder.gep(each, [place])
            request(builder, builder.bitcast(line, ir.IntType(8).as_pointer()))
        return [[self._weights(builder.gep(each, [place]))] for each in self._panels]

    def end(self) -> None:
        """At the end of the loop."""

    def _weights(self, address: Any) -> Any:
        builder = self._builder
        if self.kind == types.float32:
            return _load(builder, address, _VECTOR, 4)
        if self.kind == types.uint32:
            return _load(builder, address, _WORD_VECTOR, 4)
        words = builder.zext(_load(builder, address, _HALF_VECTOR, 2), _WORD_VECTOR)
        return builder.bitcast(builder.shl(words, ir.Constant(_WORD_VECTOR, [16] * PANEL)), _VECTOR)


def _values_at(builder: Any, row: Any, column: Any, kind: Any, paired: bool) -> list[Any]:
    """What a row has for each of `_factors_of` a column, in every lane."""
    if kind == types.uint32:
        word = _splat(builder, builder.load(builder.gep(row, [column])))
        return [builder.bitcast(word, _PAIRS_VECTOR)]
    places = [column]
    if paired:
        first = builder.shl(column, column.type(1))
        places = [builder.add(first, column.type(1)), first]
    return [_splat(builder, builder.load(builder.gep(row, [place]))) for place in places]


def sums_of_products(
    builder: Any, x_kind: Any, rows: Sequence[Any], panels: PlainPanels | CompactPanels, depth: Any
) -> list[Any]:
    """Emit the loop over ``depth`` columns, pairs of them, or as many as panels read at once: the
    sums of every row with every panel, panels of a row side by side.

    ``x_kind`` is numba's type of the values that ``rows`` point to.
    """
    paired, multiplies_pairs = panels.kind in _PAIRED, x_kind == types.uint32
    name, factor = f"llvm.fma.v{PANEL}f32", _VECTOR
    if multiplies_pairs:
        name, factor = "llvm.x86.avx512bf16.dpbf16ps.512", _PAIRS_VECTOR
    taken = [_VECTOR, factor, factor] if multiplies_pairs else [factor, factor, _VECTOR]
    function = ir.FunctionType(_VECTOR, taken)
    fused = cgutils.get_or_insert_function(builder.module, function, name)

    def multiply_add(value: Any, weights: Any, total: Any) -> Any:
        operands = [total, value, weights] if multiplies_pairs else [value, weights, total]
        return builder.call(fused, operands)

    index = depth.type
    before = builder.block
    loop = builder.append_basic_block("columns")
    done = builder.append_basic_block("columns_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    column = builder.phi(index)
    column.add_incoming(index(0), before)
    sums = [builder.phi(_VECTOR) for _ in range(len(rows) * panels.count)]
    for accumulator in sums:
        accumulator.add_incoming(ir.Constant(_VECTOR, [0.0] * PANEL), before)
    panels.begin()
    read = panels.read(column)
    first = builder.mul(column, index(panels.columns_at_once))
    updated = list(sums)
    for each in range(panels.columns_at_once):
        own = builder.add(first, index(each))
        factors = [
            _factors_of(builder, one[each], multiplies_pairs) if paired else [one[each]]
            for one in read
        ]
        for number, row in enumerate(rows):
            values = _values_at(builder, row, own, x_kind, paired)
            for place, of_panel in enumerate(factors, number * panels.count):
                for value, weights in zip(values, of_panel, strict=True):
                    updated[place] = multiply_add(value, weights, updated[place])
    following = builder.add(column, index(1))
    column.add_incoming(following, builder.block)
    for accumulator, value in zip(sums, updated, strict=True):
        accumulator.add_incoming(value, builder.block)
    panels.end()
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)
    builder.position_at_end(done)
    return updated


def put_sums(builder: Any, sums: Sequence[Any], rows: Sequence[Any], *, add: bool) -> None:
    """Store those of a row from where it points to in ``rows``, or add them to what is there."""
    panels = len(sums) // len(rows)
    for number, total in enumerate(sums):
        row, panel = divmod(number, panels)
        address = builder.gep(rows[row], [ir.IntType(64)(panel * PANEL)])
        pointer = builder.bitcast(address, _VECTOR.as_pointer())
        if add:
            total = builder.fadd(builder.load(pointer, align=4), total)
        builder.store(total, pointer, align=4)


def rows_from(builder: Any, array: Any, row: Any, column: Any, count: int) -> list[Any]:
    """Pointers to ``array[row + r, column]`` for ``count`` rows r; unit stride along a row."""
    width = cgutils.unpack_tuple(builder, array.strides)[0]
    stride = builder.sdiv(width, width.type(_WORD_BYTES))
    places = [builder.mul(stride, builder.add(row, row.type(each))) for each in range(count)]
    return [builder.gep(array.data, [builder.add(place, column)]) for place in places]


@intrinsic(prefer_literal=True)
def tile(
    typing_context: Any,
    rows: Any,
    panels: Any,
    fetched: Any,
    add: Any,
    x: Any,
    x_row: Any,
    weight: Any,
    first_panel: Any,
    ahead: Any,
    out: Any,
) -> Any:
    """In nopython code rows ``x_row ...`` for the panels from ``first_panel`` on, stored or, where
    ``add``, added; meanwhile as many panels as are ``fetched`` are asked of memory, from so many
    weights ``ahead`` on.

    ``rows``, ``panels`` and ``fetched`` are literal integers. ``x [T, >= K] float32`` has unit
    stride along its rows, ``out [T, >= P * 16] float32`` is C-contiguous. ``weight`` is packed
    panels ``[P, K, 16]`` of float32 or uint16 (bfloat16 bits), C-contiguous. Or it holds uint32,
    pairs of bfloat16 of neighbouring columns ``[P, K / 2, 16]``: then the values of ``x`` are
    bfloat16, too, as float32 or (where `MULTIPLIES_PAIRS`) as such pairs ``[T, K / 2] uint32``. Or
    it is such panels as `kernels.linear.compact` has them, uint8 ``[P, lines, 64]``.
    """
    row_count, panel_count = rows.literal_value, panels.literal_value

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, _, add_value, x_value, row, weight_value, panel, ahead_value, out_value = arguments
        x_array = context.make_array(x)(context, builder, x_value)
        weight_array = context.make_array(weight)(context, builder, weight_value)
        out_array = context.make_array(out)(context, builder, out_value)
        _, depth, line = cgutils.unpack_tuple(builder, weight_array.shape)
        index = depth.type
        panel_size = builder.mul(depth, line)
        own: PlainPanels | CompactPanels
        if weight.dtype == types.uint8:
            which = builder.and_(panel, index(1))
            both = builder.mul(panel_size, builder.sub(panel, which))
            columns = cgutils.unpack_tuple(builder, x_array.shape)[1]
            words = WORDS_OF_UNIT * (1 if x.dtype == types.uint32 else 2)
            depth = builder.udiv(columns, index(words))
            pair = builder.gep(weight_array.data, [both])
            asked = fetched.literal_value
            own = CompactPanels(builder, pair, which, panel_count, depth, ahead_value, asked)
        else:
            start = builder.gep(weight_array.data, [builder.mul(panel_size, panel)])

            def panels_from(pointer: Any, count: int) -> list[Any]:
                places = [builder.mul(panel_size, index(each)) for each in range(count)]
                return [builder.gep(pointer, [place]) for place in places]

            ahead_ = panels_from(builder.gep(start, [ahead_value]), fetched.literal_value)
            near = panels_from(start, panel_count)
            own = PlainPanels(builder, weight.dtype, near, index(PANEL), ahead_)
        rows_ = rows_from(builder, x_array, row, index(0), row_count)
        sums = sums_of_products(builder, x.dtype, rows_, own, depth)
        first = builder.mul(panel, index(PANEL))
        there = rows_from(builder, out_array, row, first, row_count)
        with builder.if_else(add_value) as (added, stored):
            with added:
                put_sums(builder, sums, there, add=True)
            with stored:
                put_sums(builder, sums, there, add=False)
        return context.get_dummy_value()

    index, flag = types.intp, types.boolean
    signature = types.void(rows, panels, fetched, flag, x, index, weight, index, index, out)
    return signature, code_generator
