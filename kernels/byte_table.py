"""Sixteen bytes in a register as a table that many bytes are looked up in at once, inside numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from lexshard.kernels.processor import has_feature

ENTRIES = 16

# How many bytes one instruction looks up; "": none does.
if has_feature("avx512bw"):
    WIDTH, INSTRUCTION = 64, "llvm.x86.avx512.pshuf.b.512"
elif has_feature("avx2"):
    WIDTH, INSTRUCTION = 32, "llvm.x86.avx2.pshuf.b"
else:
    WIDTH, INSTRUCTION = 32, ""

_I32 = ir.IntType(32)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)


def lanes(indices: list[int]) -> ir.Constant:
    """What `shuffle_vector` takes for these lanes."""
    return ir.Constant(ir.VectorType(_I32, len(indices)), indices)


def look_up(builder: Any, table: Any, indices: Any) -> Any:
    """``table[index]`` for every byte of ``indices``, a multiple of `WIDTH` of them, all below
    `ENTRIES`; ``table`` is a vector of so many bytes."""
    count = indices.type.count
    if count > WIDTH:
        parts = [
            look_up(builder, table, builder.shuffle_vector(indices, indices, lanes(each)))
            for each in (list(range(count // 2)), list(range(count // 2, count)))
        ]
        return builder.shuffle_vector(*parts, lanes(list(range(count))))
    if not INSTRUCTION:
        result = ir.Constant(_BYTES, ir.Undefined)
        for lane in range(WIDTH):
            index = builder.zext(builder.extract_element(indices, _I32(lane)), _I32)
            value = builder.extract_element(table, index)
            result = builder.insert_element(result, value, _I32(lane))
        return result
    repeated = builder.shuffle_vector(table, table, lanes(list(range(ENTRIES)) * (WIDTH // 16)))
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    shuffle = cgutils.get_or_insert_function(builder.module, kind, INSTRUCTION)
    return builder.call(shuffle, [repeated, indices])
