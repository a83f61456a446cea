"""Compact weights (`kernels.linear.compact`) as words in registers, inside numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from lexshard.kernels.byte_table import ENTRIES, lanes, look_up
from lexshard.kernels.linear.compact import (
    FLAGS,
    HALF,
    OUTPUTS,
    UNIT_BYTES,
    WHOLE_BYTES,
    WORDS_OF_UNIT,
)
from lexshard.kernels.prefetch import request
from lexshard.kernels.quantize.layout import LINE

_BIT, _BYTE, _INDEX = ir.IntType(1), ir.IntType(8), ir.IntType(64)
_BYTES, _PAIRS = ir.VectorType(_BYTE, HALF), ir.VectorType(ir.IntType(16), HALF // 2)
_TABLE, _WORDS = ir.VectorType(_BYTE, ENTRIES), ir.VectorType(ir.IntType(32), OUTPUTS)


def _interleaved(half: int) -> list[int]:
    """Which of 64 lower bytes, followed by as many upper ones, make the 16 words of the first or
    the second half of the words that they are of: as processors interleave them, 16 at a time."""
    pairs = [(group * 16 + 8 * half + each) for group in range(4) for each in range(8)]
    return [place for pair in pairs for place in (pair, HALF + pair)]


class CompactPanels:
    """Emits the loads of one or both of two panels that share their lines, unit after unit."""

    columns_at_once = WORDS_OF_UNIT
    kind = types.uint8

    def __init__(
        self, builder: Any, pair: Any, which: Any, count: int, units: Any, ahead: Any, asked: int
    ) -> None:
        """Before the loop. ``pair`` points to both; of one alone, a ``count`` of 1, ``which`` is
        its number. Of what follows ``ahead`` bytes further, the lines of ``asked`` units are asked
        of memory for each."""
        self._builder, self._which, self.count = builder, which, count
        self._ahead, self._asked, self._pair = ahead, asked, pair
        flags = builder.udiv(builder.add(units, _INDEX(3)), _INDEX(4))
        header = builder.add(flags, _INDEX(FLAGS + LINE - 1))
        self._start = builder.gep(pair, [builder.and_(header, _INDEX(-LINE))])
        self._flags = builder.gep(pair, [_INDEX(FLAGS)])
        numbers = [_INDEX(0), _INDEX(1)] if self.count == 2 else [which]
        self._tables = [
            self._load(builder.gep(pair, [builder.mul(each, _INDEX(ENTRIES))]), 0, _TABLE)
            for each in numbers
        ]
        self._before = builder.block

    def begin(self) -> None:
        """At the head of the loop."""
        self._place = self._builder.phi(self._start.type)
        self._place.add_incoming(self._start, self._before)

    def read(self, unit: Any) -> list[list[Any]]:
        """Of every panel the words of a unit, in vectors of 16."""
        builder, place = self._builder, self._place
        self._ask(unit)
        flags = builder.load(builder.gep(self._flags, [builder.lshr(unit, _INDEX(2))]))
        shift = builder.shl(builder.and_(unit, _INDEX(3)), _INDEX(1))
        flags = builder.lshr(builder.zext(flags, _INDEX), shift)
        whole = [builder.trunc(builder.lshr(flags, _INDEX(each)), _BIT) for each in range(2)]
        sizes = [builder.select(each, _INDEX(WHOLE_BYTES), _INDEX(UNIT_BYTES)) for each in whole]
        behind = builder.gep(place, [sizes[0]])
        self._following = builder.gep(behind, [sizes[1]])
        if self.count == 2:
            own = zip((place, behind), whole, self._tables, strict=True)
            return [self._unit(*each) for each in own]
        is_second = builder.trunc(self._which, _BIT)
        start, stays = (
            builder.select(is_second, *each) for each in ((behind, place), (whole[1], whole[0]))
        )
        return [self._unit(start, stays, self._tables[0])]

    def end(self) -> None:
        """At the end of the loop."""
        self._place.add_incoming(self._following, self._builder.block)

    def _ask(self, unit: Any) -> None:
        builder, size = self._builder, self._asked * UNIT_BYTES
        start = self._place
        if self._asked == 1:  # what is behind both of them, in two parts
            start = builder.gep(self._pair, [builder.mul(unit, _INDEX(size))])
        for line in range(0, size, LINE):
            request(builder, builder.gep(start, [builder.add(self._ahead, _INDEX(line))]), 1)

    def _load(self, base: Any, offset: int, kind: Any) -> Any:
        address = self._builder.gep(base, [_INDEX(offset)])
        return self._builder.load(self._builder.bitcast(address, kind.as_pointer()), align=1)

    def _unit(self, place: Any, is_whole: Any, table: Any) -> list[Any]:
        """The words of a unit."""
        builder = self._builder
        with builder.if_else(is_whole, likely=False) as (whole, compact):
            with whole:
                as_it_is = [self._load(place, LINE * each, _WORDS) for each in range(WORDS_OF_UNIT)]
                of_whole = builder.block
            with compact:
                made = self._made(place, table)
                of_compact = builder.block
        words = [builder.phi(_WORDS) for _ in made]
        for word, *values in zip(words, as_it_is, made, strict=True):
            for value, block in zip(values, (of_whole, of_compact), strict=True):
                word.add_incoming(value, block)
        return words

    def _made(self, place: Any, table: Any) -> list[Any]:
        """The words of a unit that is not whole."""
        builder = self._builder
        codes = self._load(place, 0, _BYTES)
        fifteen, four = ir.Constant(_BYTES, [15] * HALF), ir.Constant(_PAIRS, [4] * (HALF // 2))
        shifted = builder.lshr(builder.bitcast(codes, _PAIRS), four)
        words = []
        for half, numbers in enumerate((codes, builder.bitcast(shifted, _BYTES))):
            lower = self._load(place, HALF * (1 + half), _BYTES)
            upper = look_up(builder, table, builder.and_(numbers, fifteen))
            for each in range(2):
                mixed = builder.shuffle_vector(lower, upper, lanes(_interleaved(each)))
                words.append(builder.bitcast(mixed, _WORDS))
        return words
