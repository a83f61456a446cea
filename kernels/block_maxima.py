"""The largest logit of every block in LLVM vector code: a load and a comparison for sixteen.

A third of the time of numba's own loops, whatever is said about their floats.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.masks import NONE, allows
from lexshard.kernels.prefetch import prefetch_address

LANES = 16

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _ORDER = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_BITS, _HELD = ir.IntType(LANES), ir.VectorType(ir.IntType(1), LANES)
_NOTHING = ir.Constant(_FLOATS, [float("-inf")] * LANES)


def _write_maximum(builder, data, first, word):  # type: ignore[no-untyped-def]
    """The largest of the 64 fp32 at ``data[first]`` that ``word``, if there is one, holds."""
    base = builder.add(builder.ptrtoint(data, _I64), builder.mul(first, _I64(4)))

    def larger(one, other):  # type: ignore[no-untyped-def]
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    parts = []
    for offset in range(0, BLOCK, LANES):
        address = builder.add(base, _I64(4 * offset))
        prefetch_address(builder, address)
        part = builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
        if word is not None:
            own = builder.trunc(builder.lshr(word, _I64(offset)), _BITS)
            part = builder.select(builder.bitcast(own, _HELD), part, _NOTHING)
        parts.append(part)
    highest = larger(larger(parts[0], parts[1]), larger(parts[2], parts[3]))
    width = LANES // 2
    while width:
        order = ir.Constant(_ORDER, [(lane + width) % LANES for lane in range(LANES)])
        highest = larger(highest, builder.shuffle_vector(highest, highest, order))
        width //= 2
    return builder.extract_element(highest, _I32(0))


@intrinsic
def _block_maximum(typingctx, logits, first):  # type: ignore[no-untyped-def]
    """The largest of ``logits[first:first + 64]``, contiguous fp32 without NaN; the next blocks are
    asked of memory."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(logits)(context, builder, arguments[0]).data
        return _write_maximum(builder, data, arguments[1], None)

    return types.float32(logits, types.int64), codegen


@intrinsic
def _held_maximum(typingctx, logits, first, word):  # type: ignore[no-untyped-def]
    """The largest of those that the bits of ``word`` hold, minus infinity where it holds none."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(logits)(context, builder, arguments[0]).data
        return _write_maximum(builder, data, arguments[1], arguments[2])

    return types.float32(logits, types.int64, types.uint64), codegen


@njit(nogil=True, cache=True, inline="always")
def largest_of(logits):  # type: ignore[no-untyped-def]
    """The largest of up to 64 ``logits``, contiguous fp32 without NaN."""
    if logits.size == BLOCK:
        return _block_maximum(logits, 0)
    highest = np.float32(-np.inf)
    for index in range(logits.size):
        highest = max(highest, logits[index])
    return highest


@njit(nogil=True, cache=True)
def block_maxima(logits, maxima):  # type: ignore[no-untyped-def]
    """Writes the largest of every 64 ``logits`` [V], contiguous fp32 without NaN; returns the
    largest of all."""
    highest = np.float32(-np.inf)
    whole = logits.size // BLOCK
    for block in range(whole):
        maxima[block] = _block_maximum(logits, block * BLOCK)
        highest = max(highest, maxima[block])
    if whole * BLOCK < logits.size:
        maxima[whole] = largest_of(logits[whole * BLOCK :])
        highest = max(highest, maxima[whole])
    return highest


@njit(nogil=True, cache=True)
def held_maxima(logits, words, maxima):  # type: ignore[no-untyped-def]
    """Writes the largest of every 64 ``logits`` [V] that a mask of ``words`` holds, minus infinity
    where it holds none."""
    whole = logits.size // BLOCK
    for block in range(whole):
        if words[block] == NONE:
            maxima[block] = -np.inf
        else:
            maxima[block] = _held_maximum(logits, block * BLOCK, words[block])
    if whole * BLOCK < logits.size:
        maxima[whole] = -np.inf
        for token in range(whole * BLOCK, logits.size):
            if allows(words, token):
                maxima[whole] = max(maxima[whole], logits[token])
