"""Words of memory that several threads read and write, and waiting for them, in nopython code."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_VOID = ir.VoidType()
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_ORDER = "seq_cst"
_BYTES = 8


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Where entry ``index`` of an array of int64 is."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@intrinsic
def load(typing_context: Any, words: Any, index: Any) -> Any:
    """``words[index]`` as the last thread has left it, and all that it had written before."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, words, *arguments)
        return builder.load_atomic(place, _ORDER, _BYTES)

    return types.int64(words, types.intp), code_generator


@intrinsic
def store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """``words[index] = value``, after all that this thread has written before."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, place, value_ = arguments
        where = _place(context, builder, words, array, place)
        builder.store_atomic(value_, where, _ORDER, _BYTES)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), code_generator


@intrinsic
def add(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """``words[index] += value`` in one go; what it was before."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, place, value_ = arguments
        where = _place(context, builder, words, array, place)
        return builder.atomic_rmw("add", where, value_, _ORDER)

    return types.int64(words, types.intp, types.int64), code_generator


@intrinsic
def pause(typing_context: Any) -> Any:
    """Some cycles in which the core's other thread has its units, and memory its peace."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _IS_X86:
            name, taken = "llvm.x86.sse2.pause", []
        else:
            name, taken = "llvm.aarch64.hint", [ir.IntType(32)]
        kind = ir.FunctionType(_VOID, taken)
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [each(1) for each in taken])  # 1: yield
        return context.get_dummy_value()

    return types.void(), code_generator


@intrinsic
def address_of(typing_context: Any, words: Any, index: Any) -> Any:
    """The address of ``words[index]``, for functions of the operating system."""

    def code_generator(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, words, *arguments)
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(words, types.intp), code_generator
