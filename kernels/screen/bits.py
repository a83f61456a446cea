"""Sums of signed hidden values for 64 rows of a 1-bit tier at once, by table look-up.

Four columns of a row are four bits, and the sixteen sums they can stand for fit one vector
register: a byte shuffle then looks up a sum for each of many rows. Sums are 14 bits, in two halves
of 7, so that two of them add up inside a byte; bytes are added up as 16-bit numbers, even and odd
ones apart, for one block of 128 columns, whose 32 look-ups cannot overflow them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from lexshard.kernels.byte_table import ENTRIES, WIDTH, lanes, look_up
from lexshard.kernels.prefetch import request
from lexshard.kernels.quantize.layout import BLOCK, PANEL_ROWS
from lexshard.kernels.screen.tile import I8, I16, I32, I64

HALF_BITS = 7
OFFSET = 1 << (2 * HALF_BITS - 1)  # makes every sum of four positive
STEPS = BLOCK // 8
TABLE = 4 * ENTRIES  # bytes per step: low and high halves for its first and for its last columns
AHEAD = 8  # blocks, 8 KiB: signs are fetched from memory before they are needed
CHUNK = 16  # rows that are scaled by their multipliers together

VECTORS = PANEL_ROWS // WIDTH
_BYTES = ir.VectorType(I8, WIDTH)
_WORDS = ir.VectorType(I16, WIDTH // 2)
_ENTRIES = ir.VectorType(I8, ENTRIES)
_CHUNK_BYTES = ir.VectorType(I8, CHUNK)
_CHUNK_TOTALS = ir.VectorType(I32, CHUNK)


def _splat(vector: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def _load(builder: Any, base: Any, offset: Any, vector: ir.VectorType) -> Any:
    address = builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())
    return builder.load(address, align=1)


@intrinsic
def _sum_block(typingctx, codes, tables, multipliers, sums):  # type: ignore[no-untyped-def]
    """Adds one block of 128 columns of a panel to ``sums`` [64] int32, times ``multipliers`` [64].

    ``codes`` [16, 64] and ``tables`` [16, 64] uint8, all arrays C-contiguous.
    """
    signature = types.void(codes, tables, multipliers, sums)

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        bases = [
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        rows, lookups, factors, target = bases
        target = builder.bitcast(target, I8.as_pointer())
        fifteen, four = _splat(_BYTES, 15), _splat(_WORDS, 4)
        eight = _splat(_WORDS, 8)
        zero = ir.Constant(_WORDS, [0] * _WORDS.count)
        # Per vector of rows and half of the sums: all bytes, and the odd ones.
        mixed = [[zero, zero] for _ in range(VECTORS)]
        odd = [[zero, zero] for _ in range(VECTORS)]
        for step in range(STEPS):
            request(builder, builder.gep(rows, [I64(PANEL_ROWS * (step + AHEAD * STEPS))]), 2)
            place = [I64(TABLE * step + ENTRIES * part) for part in range(4)]
            tables_of = [_load(builder, lookups, offset, _ENTRIES) for offset in place]
            for number in range(VECTORS):
                offset = I64(PANEL_ROWS * step + WIDTH * number)
                code = _load(builder, rows, offset, _BYTES)
                first = builder.and_(code, fifteen)
                shifted = builder.lshr(builder.bitcast(code, _WORDS), four)
                last = builder.and_(builder.bitcast(shifted, _BYTES), fifteen)
                for half in range(2):
                    both = builder.add(
                        look_up(builder, tables_of[half], first),
                        look_up(builder, tables_of[2 + half], last),
                    )
                    words = builder.bitcast(both, _WORDS)
                    mixed[number][half] = builder.add(mixed[number][half], words)
                    high = builder.lshr(words, eight)
                    odd[number][half] = builder.add(odd[number][half], high)
        for number in range(VECTORS):
            even = [
                builder.sub(total, builder.shl(part, eight))
                for total, part in zip(mixed[number], odd[number], strict=True)
            ]
            for parity, halves in enumerate((even, odd[number])):
                for part in range(WIDTH // 32):
                    chosen = lanes(list(range(CHUNK * part, CHUNK * (part + 1))))
                    low, high = (
                        builder.zext(builder.shuffle_vector(half, half, chosen), _CHUNK_TOTALS)
                        for half in halves
                    )
                    total = builder.add(low, builder.shl(high, _splat(_CHUNK_TOTALS, HALF_BITS)))
                    total = builder.sub(total, _splat(_CHUNK_TOTALS, 2 * STEPS * OFFSET))
                    first_row = WIDTH * number + 32 * part + CHUNK * parity
                    factor = _load(builder, factors, I64(first_row), _CHUNK_BYTES)
                    total = builder.mul(total, builder.zext(factor, _CHUNK_TOTALS))
                    address = builder.bitcast(
                        builder.gep(target, [I64(4 * first_row)]), _CHUNK_TOTALS.as_pointer()
                    )
                    before = builder.load(address, align=4)
                    builder.store(builder.add(before, total), address, align=4)
        return context.get_dummy_value()

    return signature, codegen


@njit(nogil=True, cache=True)
def fill_tables(values, tables):  # type: ignore[no-untyped-def]
    """The look-up tables [N, D / 8, 64] uint8 of ``values`` [N, D] int16, within +-2,047."""
    for query in range(values.shape[0]):
        for step in range(values.shape[1] // 8):
            for part in range(2):
                column = 8 * step + 4 * part
                first = 2 * ENTRIES * part
                total = OFFSET
                for place in range(4):
                    total -= values[query, column + place]
                for entry in range(ENTRIES):
                    value = total
                    for place in range(4):
                        if entry >> place & 1:
                            value += 2 * values[query, column + place]
                    tables[query, step, first + entry] = value & 127
                    tables[query, step, first + ENTRIES + entry] = value >> HALF_BITS


@njit(nogil=True, cache=True)
def sum_panel(signs, multipliers, panel, tables, query, sums):  # type: ignore[no-untyped-def]
    """``sums`` [64] int32: ``sum_j multiplier_ik sign_ij value_j`` of the rows of a panel."""
    sums[:] = 0
    for block in range(multipliers.shape[1]):
        first = STEPS * block
        _sum_block(
            signs[panel, first : first + STEPS],
            tables[query, first : first + STEPS],
            multipliers[panel, block],
            sums,
        )
