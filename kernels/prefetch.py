"""Asking memory for what is read soon: processors do so by themselves, but not beyond a page.

A kernel that does arithmetic on what it reads, and so has few loads in flight, is up to twice as
fast for it where a row is not in the caches of its core.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lexshard.kernels.processor import processor_name

AHEAD = 2048  # bytes
LINE = 64  # bytes that one request brings
# The cache that streams are asked into. On Zen 4 what waits for the first level holds up the loads
# that miss it: asked into the second, a screen of 8 rows takes 8 ms in place of 18.
NEAREST = 2 if processor_name() == "znver4" else 1

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()


def request(builder: ir.IRBuilder, pointer: Any, level: int = NEAREST) -> None:
    """Asks for the line at ``pointer`` (to bytes), for the cache of a level: 1 or 2. Beyond the end
    of an array this reads nothing: to ask for an address that is not there has no effect."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _I32(0), _I32(4 - level), _I32(1)])  # to read; data


def prefetch_address(builder: ir.IRBuilder, address: Any) -> None:
    """Asks for the line that is AHEAD bytes after ``address`` (an integer), wherever that is."""
    request(builder, builder.inttoptr(builder.add(address, _I64(AHEAD)), _POINTER))


@intrinsic
def prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Asks for what is AHEAD bytes after ``array[index]`` of a contiguous array."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(array)(context, builder, arguments[0]).data
        offset = builder.mul(arguments[1], _I64(array.dtype.bitwidth // 8))
        prefetch_address(builder, builder.add(builder.ptrtoint(data, _I64), offset))
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen
