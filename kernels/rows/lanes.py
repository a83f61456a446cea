"""The inner loop of the canonical logit as LLVM vector code, for numba kernels.

numba does not vectorise a float reduction without fastmath, and fastmath would give up the fixed
order. So this module writes the loop itself: per pair of a weight row and a hidden row four
vectors of four float64 lanes, then the fixed tree. Products are exact, so the multiply and the
add may be contracted to one instruction without changing a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

F32, F64 = ir.FloatType(), ir.DoubleType()
I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
LANES = 16
WIDTH = 4
QUARTERS = LANES // WIDTH


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, WIDTH)


def _load_weights(
    builder: ir.IRBuilder, address: Any, column: Any, columns: Any, bfloat16: bool
) -> Any:
    """Four weights from ``column`` on as float64; with ``columns``, lanes beyond them are 0."""
    element = I16 if bfloat16 else F32
    base = builder.inttoptr(address, element.as_pointer())
    if columns is None:
        pointer = builder.bitcast(builder.gep(base, [column]), _vector(element).as_pointer())
        loaded = builder.load(pointer, align=2 if bfloat16 else 4)
    else:
        zero = element(0 if bfloat16 else 0.0)
        loaded = ir.Constant(_vector(element), [zero.constant] * WIDTH)
        for lane in range(WIDTH):
            place = builder.add(column, I64(lane))
            inside = builder.icmp_signed("<", place, columns)
            # A lane outside reads column 0, which always exists, and is then replaced by zero.
            safe = builder.select(inside, place, I64(0))
            value = builder.select(inside, builder.load(builder.gep(base, [safe])), zero)
            loaded = builder.insert_element(loaded, value, I32(lane))
    if bfloat16:
        wide = builder.zext(loaded, _vector(I32))
        shifted = builder.shl(wide, ir.Constant(_vector(I32), [16] * WIDTH))
        loaded = builder.bitcast(shifted, _vector(F32))
    return builder.fpext(loaded, _vector(F64))


def _tree(builder: ir.IRBuilder, quarters: list[Any]) -> Any:
    """16 lanes to one: lanes 8 apart, 4 apart, 2 apart, then the last two."""
    low = builder.fadd(quarters[0], quarters[2])
    high = builder.fadd(quarters[1], quarters[3])
    four = builder.fadd(low, high)
    first = builder.shuffle_vector(four, four, ir.Constant(ir.VectorType(I32, 2), [0, 1]))
    second = builder.shuffle_vector(four, four, ir.Constant(ir.VectorType(I32, 2), [2, 3]))
    two = builder.fadd(first, second)
    return builder.fadd(builder.extract_element(two, I32(0)), builder.extract_element(two, I32(1)))


def _row_addresses(context: Any, builder: Any, array_type: Any, array: Any, rows: Any) -> list[Any]:
    matrix = context.make_array(array_type)(context, builder, array)
    base = builder.ptrtoint(matrix.data, I64)
    stride = cgutils.unpack_tuple(builder, matrix.strides)[0]
    indices = cgutils.unpack_tuple(builder, rows)
    return [builder.add(base, builder.mul(index, stride)) for index in indices]


@intrinsic
def tile(typingctx, weight, weight_rows, hidden, hidden_rows):  # type: ignore[no-untyped-def]
    """The float64 dots of some weight rows with some hidden rows, weight row by weight row.

    ``weight`` [V, d] is fp32 or uint16 (bf16 bits), ``hidden`` [N, d rounded up to 16] float64,
    zero-padded, both contiguous; the rows are tuples of int64 indices, whose lengths fix the
    shape of the tile when the caller is compiled.
    """
    pairs = weight_rows.count * hidden_rows.count
    signature = types.UniTuple(types.float64, pairs)(weight, weight_rows, hidden, hidden_rows)
    bfloat16 = weight.dtype == types.uint16
    vector = _vector(F64)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weights = _row_addresses(context, builder, weight, arguments[0], arguments[1])
        hiddens = _row_addresses(context, builder, hidden, arguments[2], arguments[3])
        matrix = context.make_array(weight)(context, builder, arguments[0])
        columns = cgutils.unpack_tuple(builder, matrix.shape)[1]

        def block(column: Any, sums: list[Any], limit: Any) -> list[Any]:
            after = list(sums)
            for quarter in range(QUARTERS):
                place = builder.add(column, I64(WIDTH * quarter))
                loaded = [_load_weights(builder, row, place, limit, bfloat16) for row in weights]
                for h, row in enumerate(hiddens):
                    pointer = builder.gep(builder.inttoptr(row, F64.as_pointer()), [place])
                    values = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=8)
                    for w in range(len(weights)):
                        slot = (w * len(hiddens) + h) * QUARTERS + quarter
                        product = builder.fmul(loaded[w], values, flags=("contract",))
                        after[slot] = builder.fadd(after[slot], product, flags=("contract",))
            return after

        whole = builder.and_(columns, I64(-LANES))
        entry = builder.block
        head = builder.append_basic_block("blocks")
        body = builder.append_basic_block("block")
        tail = builder.append_basic_block("tail")
        partial = builder.append_basic_block("partial")
        done = builder.append_basic_block("done")
        builder.branch(head)

        builder.position_at_end(head)
        column = builder.phi(I64)
        column.add_incoming(I64(0), entry)
        sums = [builder.phi(vector) for _ in range(pairs * QUARTERS)]
        for phi in sums:
            phi.add_incoming(ir.Constant(vector, [0.0] * WIDTH), entry)
        builder.cbranch(builder.icmp_signed("<", column, whole), body, tail)

        builder.position_at_end(body)
        following = block(column, sums, None)
        column.add_incoming(builder.add(column, I64(LANES)), body)
        for phi, value in zip(sums, following, strict=True):
            phi.add_incoming(value, body)
        builder.branch(head)

        builder.position_at_end(tail)
        builder.cbranch(builder.icmp_signed("<", whole, columns), partial, done)
        builder.position_at_end(partial)
        padded = block(whole, sums, columns)
        builder.branch(done)

        builder.position_at_end(done)
        totals = []
        for phi, value in zip(sums, padded, strict=True):
            total = builder.phi(vector)
            total.add_incoming(phi, tail)
            total.add_incoming(value, partial)
            totals.append(total)
        dots = [
            _tree(builder, totals[pair * QUARTERS : (pair + 1) * QUARTERS]) for pair in range(pairs)
        ]
        return context.make_tuple(builder, signature.return_type, dots)

    return signature, codegen
