"""The largest logit of a block as LLVM vector code: a load and a comparison for sixteen of them.

numba vectorises maxima of integers alone, and the bits of fp32 numbers must be turned to order like
them first: three times the instructions.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.prefetch import prefetch_address

LANES = 16

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _ORDER = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@intrinsic
def block_maximum(typingctx, logits, first):  # type: ignore[no-untyped-def]
    """The largest of ``logits[first:first + 64]``, contiguous fp32 without NaN; the next blocks are
    asked of memory."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(logits)(context, builder, arguments[0]).data
        base = builder.add(builder.ptrtoint(data, _I64), builder.mul(arguments[1], _I64(4)))

        def larger(one, other):  # type: ignore[no-untyped-def]
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        parts = []
        for offset in range(0, BLOCK, LANES):
            address = builder.add(base, _I64(4 * offset))
            prefetch_address(builder, address)
            pointer = builder.inttoptr(address, _FLOATS.as_pointer())
            parts.append(builder.load(pointer, align=4))
        highest = larger(larger(parts[0], parts[1]), larger(parts[2], parts[3]))
        width = LANES // 2
        while width:
            order = ir.Constant(_ORDER, [(lane + width) % LANES for lane in range(LANES)])
            highest = larger(highest, builder.shuffle_vector(highest, highest, order))
            width //= 2
        return builder.extract_element(highest, _I32(0))

    return types.float32(logits, types.int64), codegen
