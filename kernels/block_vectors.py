"""Blocks as vectors: upper bounds of 64 tokens, which of them reach a score, which a mask holds.

numba's own loops take several times as long: the slices that let them vectorise are references,
which are counted.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.masks import NONE, ONE

# Far above what fp64 loses of a score, and what fp32 loses of a logit.
SCORE_MARGIN, LOGIT_MARGIN = 1e-12, 1e-6
EVERY = ~NONE  # the word of a block of which all may be drawn

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_FLOATS = ir.VectorType(_F32, BLOCK)
_EVERY = ir.Constant(ir.VectorType(_I32, BLOCK), [0] * BLOCK)


def _in_every_lane(builder, value):  # type: ignore[no-untyped-def]
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, _I32(0)), undefined, _EVERY
    )


@intrinsic
def write_block_bounds(typingctx, values, row_slack, factors, first, upper):  # type: ignore[no-untyped-def]
    """`upper_bounds` of the 64 tokens from ``first`` on; everything is contiguous."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        def loaded(data):  # type: ignore[no-untyped-def]
            place = builder.gep(data, [arguments[3]])
            return builder.load(builder.bitcast(place, _FLOATS.as_pointer()), align=4)

        slacks = context.make_array(row_slack)(context, builder, arguments[1])
        width = cgutils.unpack_tuple(builder, slacks.shape)[1]
        estimates = loaded(context.make_array(values)(context, builder, arguments[0]).data)
        errors, sizes = loaded(slacks.data), loaded(builder.gep(slacks.data, [width]))
        error, size, rest, share = (
            _in_every_lane(builder, each)
            for each in cgutils.unpack_tuple(builder, arguments[2], len(factors))
        )
        slack = builder.fadd(builder.fmul(error, errors), builder.fmul(size, sizes))
        magnitude = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS]), f"llvm.fabs.v{BLOCK}f32"
        )
        own = builder.fmul(builder.call(magnitude, [estimates]), share)
        slack = builder.fadd(builder.fadd(slack, rest), own)
        target = context.make_array(upper)(context, builder, arguments[4]).data
        bounds = builder.fadd(estimates, slack)
        builder.store(bounds, builder.bitcast(target, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(values, row_slack, factors, types.intp, upper), codegen


@intrinsic
def exclude(typingctx, values, place, word):  # type: ignore[no-untyped-def]
    """Makes those of the 64 ``values``, contiguous fp32, from ``place`` on minus infinity whose bit
    of ``word`` is not set."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        place, word = arguments[1:]
        data = context.make_array(values)(context, builder, arguments[0]).data
        there = builder.bitcast(builder.gep(data, [place]), _FLOATS.as_pointer())
        held = builder.bitcast(word, ir.VectorType(ir.IntType(1), BLOCK))
        nothing = ir.Constant(_FLOATS, [float("-inf")] * BLOCK)
        builder.store(builder.select(held, builder.load(there, align=4), nothing), there, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.uint64), codegen


@intrinsic
def _reaching(typingctx, values, least):  # type: ignore[no-untyped-def]
    """A bit for each of 64 ``values``, contiguous fp32, that is not below ``least``."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(values)(context, builder, arguments[0]).data
        floats = builder.load(builder.bitcast(data, _FLOATS.as_pointer()), align=4)
        reached = builder.fcmp_ordered(">=", floats, _in_every_lane(builder, arguments[1]))
        return builder.bitcast(reached, ir.IntType(BLOCK))

    return types.uint64(values, types.float32), codegen


@njit(nogil=True, cache=True, inline="always")
def reaching(values, least):  # type: ignore[no-untyped-def]
    """A bit for each of up to 64 fp32 ``values``, contiguous, that is not below ``least``."""
    if values.size == BLOCK:
        return _reaching(values, least)
    bits = NONE
    for place in range(values.size):
        if values[place] >= least:
            bits |= ONE << np.uint64(place)
    return bits


@njit(nogil=True, cache=True, inline="always")
def least_logit(score, noise, scale):  # type: ignore[no-untyped-def]
    """No logit below this fp32 number has ``logit * scale + noise >= score`` in fp64."""
    least = (score - noise) / scale
    if not least < np.inf:  # infinite logits reach it; where the noise is infinite, too, all do
        return np.float32(np.inf if least == np.inf else -np.inf)
    margin = (abs(score) + abs(noise)) / scale * SCORE_MARGIN + abs(least) * LOGIT_MARGIN
    return np.float32(least - margin)
