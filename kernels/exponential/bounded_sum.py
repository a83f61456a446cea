"""Sums of exponentials of fp32 logits, at the speed of memory and with a bound on their error.

LLVM vector code for numba kernels: sixteen logits side by side, in four sums of their own. numba
does not vectorise a sum of floats without fastmath, which would also reorder what the bound is
proven for. Eleven vector instructions for sixteen logits:

    t = logit * factor              factor = scale / ln 2, so that exp(logit scale) = 2**t
    n = round(t)                    by adding a number whose last bit counts 1
    sum += p(t - n) 2**(n - shift)  p of degree 4, with the least largest relative error of 2**f

``shift`` is an integer near the largest ``t``. Logits far ahead are asked of memory in time, which
processors do by themselves only within a page.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from lexshard.kernels.prefetch import prefetch_address

LANES = 16
SUMS = 4
# Logits that are added up together: of so many the caller gives a multiple.
STEP = LANES * SUMS
COEFFICIENTS = (
    0.9999992847442627,
    0.6931217908859253,
    0.240247443318367,
    0.05591785907745361,
    0.009570102207362652,
)
POLYNOMIAL_ERROR = 2.8e-6  # 2.6e-6 of the polynomial, 2.7e-6 as fp32 evaluates it
# Powers of two relative to the shift that are smaller or larger count as these.
LEAST, MOST = -125.0, 126.0
# Added to a number it leaves the nearest integer, plus 127, in the low bits: shifted to the place
# of the exponent that is a power of two, since the nine bits above it are 0.
ROUNDER = 1.5 * 2.0**23 + 127.0
# Beyond it neither the shift nor what is added is exact.
LARGEST_SHIFT = 2.0**20
LOG2_E = 1.4426950408889634
UNIT = 2.0**-24

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


def relative_error(count: int, shift: float) -> float:
    """Above the relative error of a sum of up to ``count`` exponentials that is at least 0.7.

    The factor and, where multiplication and addition are not fused, its product with a logit are
    half a unit off, of at most 127 more than the shift; then there are the polynomial and the
    additions. What ``LEAST`` adds is nothing beside them.
    """
    arguments = 2.01 * UNIT * (abs(shift) + 127) * math.log(2.0)
    additions = (count / STEP + 6) * UNIT
    return arguments + POLYNOMIAL_ERROR + additions


@njit(nogil=True, cache=True)
def factor_of(scale):  # type: ignore[no-untyped-def]
    """What turns a logit into the exponent of a power of two."""
    return np.float32(scale * LOG2_E)


@njit(nogil=True, cache=True)
def shift_of(logit, factor):  # type: ignore[no-untyped-def]
    """The shift that makes the weight of a finite logit about 1."""
    return np.float32(np.rint(np.float64(logit) * np.float64(factor)))


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [float(np.float32(value))] * LANES)


def _splat(builder: ir.IRBuilder, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _I32(0))
    zeros = ir.Constant(_WORDS, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), zeros)


def _multiply_add(builder: ir.IRBuilder, one: Any, other: Any, added: Any) -> Any:
    fuse = ("contract",)
    return builder.fadd(builder.fmul(one, other, flags=fuse), added, flags=fuse)


def _add_weights(builder: ir.IRBuilder, total: Any, logits: Any, constants: list[Any]) -> Any:
    """``total`` and sixteen of ``2**(logits factor - shift)``."""
    factor, rounder, lowest, highest = constants
    for bound, order in ((lowest, ">"), (highest, "<")):
        logits = builder.select(builder.fcmp_ordered(order, logits, bound), logits, bound)
    rounded = _multiply_add(builder, logits, factor, rounder)
    whole = builder.fsub(rounder, rounded)
    rest = _multiply_add(builder, logits, factor, whole)
    value = _constant(COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        value = _multiply_add(builder, value, rest, _constant(coefficient))
    exponent = ir.Constant(_WORDS, [23] * LANES)
    power = builder.bitcast(builder.shl(builder.bitcast(rounded, _WORDS), exponent), _FLOATS)
    return _multiply_add(builder, value, power, total)


@intrinsic
def sum_of_exponentials(typingctx, logits, first, stop, shift, factor):  # type: ignore[no-untyped-def]
    """``sum(2**(logits[first:stop] factor - shift))`` in fp32.

    ``logits`` [V] is contiguous fp32; ``stop - first`` is a multiple of STEP; ``shift`` is an
    integer of at most LARGEST_SHIFT. Too large a weight makes the sum larger than ``2**125``.
    """
    signature = types.float32(logits, types.int64, types.int64, types.float32, types.float32)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        array, begin, end, shift, factor = arguments
        base = builder.ptrtoint(context.make_array(logits)(context, builder, array).data, _I64)
        limits = [builder.fdiv(builder.fadd(shift, _F32(power)), factor) for power in (LEAST, MOST)]
        rounder = builder.fsub(_F32(ROUNDER), shift)
        constants = [_splat(builder, each) for each in (factor, rounder, *limits)]
        entry = builder.block
        head = builder.append_basic_block("steps")
        body = builder.append_basic_block("step")
        done = builder.append_basic_block("done")
        builder.branch(head)

        builder.position_at_end(head)
        place = builder.phi(_I64)
        place.add_incoming(begin, entry)
        sums = [builder.phi(_FLOATS) for _ in range(SUMS)]
        for each in sums:
            each.add_incoming(_constant(0.0), entry)
        builder.cbranch(builder.icmp_signed("<", place, end), body, done)

        builder.position_at_end(body)
        for index, each in enumerate(sums):
            lane = builder.add(place, _I64(index * LANES))
            address = builder.add(base, builder.mul(lane, _I64(4)))
            prefetch_address(builder, address)
            loaded = builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
            each.add_incoming(_add_weights(builder, each, loaded, constants), body)
        place.add_incoming(builder.add(place, _I64(STEP)), body)
        builder.branch(head)

        builder.position_at_end(done)
        total = builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))
        width = LANES // 2
        while width:
            order = ir.Constant(_WORDS, [(lane + width) % LANES for lane in range(LANES)])
            total = builder.fadd(total, builder.shuffle_vector(total, total, order))
            width //= 2
        return builder.extract_element(total, _I32(0))

    return signature, codegen
