"""Counters that two processes may read and write at once.

A plain store of a counter may become visible before the data it announces: compilers reorder, and
so do weakly ordered processors such as Arm's. An acquire load sees everything that was written
before the release store whose value it reads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

import lexshard.kernels  # noqa: F401  it says where numba keeps what it compiled

ALIGNMENT = 8


@intrinsic
def _load(typing_context, array):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _first_item(context, builder, signature, arguments)
        return builder.load_atomic(pointer, "acquire", ALIGNMENT, typ=ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def _store(typing_context, array, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _first_item(context, builder, signature, arguments)
        builder.store_atomic(arguments[1], pointer, "release", ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def _first_item(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [cgutils.intp_t(0)])


@njit("int64(int64[::1])", cache=True)
def _load_acquire(counter):  # type: ignore[no-untyped-def]
    return _load(counter)


@njit("void(int64[::1], int64)", cache=True)
def _store_release(counter, value):  # type: ignore[no-untyped-def]
    _store(counter, value)


def load_acquire(counter: npt.NDArray[np.int64]) -> int:
    """The value of ``counter`` [1]; what was written before it was stored is visible now."""
    return _load_acquire(counter)


def store_release(counter: npt.NDArray[np.int64], value: int) -> None:
    """Sets ``counter`` [1] to ``value``, after everything written before."""
    _store_release(counter, value)
