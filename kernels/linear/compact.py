"""Weights in bfloat16 in three quarters of their bytes, and not a bit is lost.

Of a bfloat16 the lower byte can be anything; the upper one, a sign and most of an exponent, is
nearly always one of a few. A panel has a table of the sixteen upper bytes that are most frequent
in it. A unit, the weights of eight columns (four words of two for each of 16 outputs), is 64 bytes
of numbers in that table, half a byte each, then 128 lower bytes. A unit with another upper byte,
one in a hundred, stays whole, 256 bytes. Products are those of the words, in the same order: words
are made in registers, while memory, which few rows wait for, brings the next ones.

Two panels are one stream of bytes, which memory gives faster than two: the tables of both, which
of their units are whole, then a unit of each in turn.

Zhang et al., *70% Size, 100% Accuracy: Lossless LLM Compression for Efficient GPU Inference via
Dynamic-Length Float* (2025), show of many models how few bits their exponents hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.byte_table import ENTRIES
from lexshard.kernels.processor import has_feature, sums_as_matrices
from lexshard.kernels.quantize.layout import LINE, aligned
from lexshard.kernels.team.cores import available_cores

WORDS_OF_UNIT = 4  # of two columns each
UNIT_BYTES, WHOLE_BYTES = 192, 256  # of a unit, and of one that stays whole
# What must remain of the bytes, at most, to be worth it.
WORTH = 0.85
OUTPUTS = 16
HALF = 64  # weights of a unit whose numbers are in the lower, or the upper, halves of 64 bytes
FLAGS = 2 * ENTRIES  # where it is said which units are whole: two bits for each unit of both
# Products without AVX-512 keep the processor busy: one or two rows would be faster, more slower.
_ENOUGH_VECTORS = has_feature("avx512bw")
# Weights of fewer bytes than this stay in the caches, which give them as fast as they are.
FROM_BYTES = 2**25


@njit(nogil=True, cache=True)
def _place(row: int, output: int) -> int:
    """Where among 64 bytes the first weight of a word is, the second behind it: of the first or
    second word of a half of a unit, for an output."""
    return 16 * (output // 4) + 8 * row + 2 * (output % 4)


@njit(nogil=True, cache=True)
def _byte(word: np.uint32, number: int) -> np.uint8:
    return np.uint8((word >> np.uint32(8 * number)) & np.uint32(255))


@njit(nogil=True, cache=True)
def _survey(panels, tables, whole):  # type: ignore[no-untyped-def]
    """Of ``panels [P, words, 16] uint32`` the tables ``[P, 16]`` and, ``[P, units]``, which units
    stay whole."""
    numbers = np.empty(256, np.uint8)
    for panel in range(panels.shape[0]):
        apart = np.zeros((8, 256), np.int64)  # a processor waits for a count it has just written
        for row in range(panels.shape[1]):
            for output in range(OUTPUTS):
                for each in range(2):
                    upper = _byte(panels[panel, row, output], 2 * each + 1)
                    apart[output % 4 * 2 + each, upper] += 1
        counts = apart.sum(axis=0)
        for upper in range(256):
            numbers[upper] = ENTRIES
        for number in range(ENTRIES):
            most = 0
            for upper in range(256):
                most = upper if counts[upper] > counts[most] else most
            tables[panel, number], numbers[most], counts[most] = most, number, -1
        for unit in range(whole.shape[1]):
            largest = np.uint8(0)
            for row in range(unit * WORDS_OF_UNIT, (unit + 1) * WORDS_OF_UNIT):
                for output in range(OUTPUTS):
                    for each in range(1, 4, 2):
                        largest = max(largest, numbers[_byte(panels[panel, row, output], each)])
            whole[panel, unit] = largest == ENTRIES


@njit(nogil=True, cache=True)
def _write(panels, tables, whole, header, out):  # type: ignore[no-untyped-def]
    """``panels`` as ``out [P / 2, bytes]``, after `_survey`; two begin with ``header`` bytes."""
    numbers = np.zeros((2, 256), np.uint8)
    for pair in range(out.shape[0]):
        target, start = out[pair], header
        for each in range(2):
            for number in range(ENTRIES):
                upper = tables[2 * pair + each, number]
                target[ENTRIES * each + number] = upper
                numbers[each, upper] = number
        for unit in range(whole.shape[1]):
            for each in range(2):
                begin = unit * WORDS_OF_UNIT
                rows = panels[2 * pair + each, begin : begin + WORDS_OF_UNIT]
                if whole[2 * pair + each, unit]:
                    target[FLAGS + unit // 4] |= np.uint8(1 << (unit % 4 * 2 + each))
                    _write_whole(rows, target, start)
                    start += WHOLE_BYTES
                else:
                    _write_unit(rows, numbers[each], target, start)
                    start += UNIT_BYTES


@njit(nogil=True, cache=True)
def _write_whole(rows, target, start):  # type: ignore[no-untyped-def]
    for row in range(WORDS_OF_UNIT):
        for output in range(OUTPUTS):
            for number in range(4):
                place = start + LINE * row + 4 * output + number
                target[place] = _byte(rows[row, output], number)


@njit(nogil=True, cache=True)
def _write_unit(rows, numbers, target, start):  # type: ignore[no-untyped-def]
    codes, lower = target[start : start + HALF], target[start + HALF : start + 3 * HALF]
    for half in range(2):
        shift = np.uint8(4 * half)
        for output in range(OUTPUTS):
            for row in range(2):
                word, place = rows[2 * half + row, output], _place(row, output)
                for each in range(2):
                    lower[HALF * half + place + each] = _byte(word, 2 * each)
                    codes[place + each] |= np.uint8(numbers[_byte(word, 2 * each + 1)] << shift)


@njit(nogil=True, cache=True)
def _read(compact, header, panels):  # type: ignore[no-untyped-def]
    """What `_write` made ``compact [P / 2, bytes]`` of, to ``panels [P, words, 16] uint32``."""
    for pair in range(compact.shape[0]):
        source, start = compact[pair], header
        for unit in range(panels.shape[1] // WORDS_OF_UNIT):
            for each in range(2):
                begin = unit * WORDS_OF_UNIT
                rows = panels[2 * pair + each, begin : begin + WORDS_OF_UNIT]
                if (source[FLAGS + unit // 4] >> (unit % 4 * 2 + each)) & 1:
                    _read_whole(source, start, rows)
                    start += WHOLE_BYTES
                else:
                    _read_unit(source, start, ENTRIES * each, rows)
                    start += UNIT_BYTES


@njit(nogil=True, cache=True)
def _read_whole(source, start, rows):  # type: ignore[no-untyped-def]
    for row in range(WORDS_OF_UNIT):
        for output in range(OUTPUTS):
            word = np.uint32(0)
            for number in range(4):
                byte = source[start + LINE * row + 4 * output + number]
                word |= np.uint32(np.uint32(byte) << np.uint32(8 * number))
            rows[row, output] = word


@njit(nogil=True, cache=True)
def _read_unit(source, start, table, rows):  # type: ignore[no-untyped-def]
    codes, lower = source[start : start + HALF], source[start + HALF : start + 3 * HALF]
    for half in range(2):
        for output in range(OUTPUTS):
            for row in range(2):
                place, word = _place(row, output), np.uint32(0)
                for each in range(2):
                    upper = source[table + ((codes[place + each] >> (4 * half)) & 15)]
                    both = np.uint32(upper) << np.uint32(8) | lower[HALF * half + place + each]
                    word |= np.uint32(both << np.uint32(16 * each))
                rows[2 * half + row, output] = word


def should_be_compact(bytes_: int) -> bool:
    """Whether a stack of layers that multiplies words of two bfloat16, so many bytes of them, is
    faster so."""
    return _ENOUGH_VECTORS and not sums_as_matrices() and bytes_ >= FROM_BYTES


def _header_bytes(units: int) -> int:
    """Bytes of two panels before their units."""
    return -(-(FLAGS + -(-units // 4)) // LINE) * LINE


def compacted(panels: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8] | None:
    """``panels [P, words, 16]``, words of two bfloat16 each, a multiple of `WORDS_OF_UNIT`, as
    ``[P, lines, 64]``, of which two panels share theirs; None where that is not worth it, or P is
    odd."""
    pairs, odd = divmod(len(panels), 2)
    if odd:
        return None
    units = panels.shape[1] // WORDS_OF_UNIT
    tables = np.empty((2 * pairs, ENTRIES), np.uint8)
    whole = np.empty((2 * pairs, units), np.bool_)
    count = min(available_cores(), pairs)
    ends = [pairs * each // count for each in range(count + 1)]
    parts = [(slice(2 * low, 2 * high), slice(low, high)) for low, high in pairwise(ends)]
    with ThreadPoolExecutor(count) as threads:

        def in_parts(work: Callable[[slice, slice], None]) -> None:
            list(threads.map(work, *zip(*parts, strict=True)))

        in_parts(lambda each, _: _survey(panels[each], tables[each], whole[each]))
        header, more = _header_bytes(units), WHOLE_BYTES - UNIT_BYTES
        bytes_ = header + 2 * UNIT_BYTES * units + more * whole.reshape(pairs, -1).sum(axis=1)
        if bytes_.mean() > WORTH * 2 * WHOLE_BYTES * units:
            return None
        lines = -(-int(bytes_.max()) // (2 * LINE))
        out = aligned((pairs, 2 * lines * LINE), np.uint8)
        in_parts(
            lambda each, own: _write(panels[each], tables[each], whole[each], header, out[own])
        )
    return out.reshape(2 * pairs, lines, LINE)


def stacked(
    layers: Iterable[npt.NDArray[np.uint8] | None],
) -> npt.NDArray[np.uint8] | None:
    """What `compacted` gives for each of some layers as ``[L, P, lines, 64]``; None if that is not
    worth it for one of them."""
    parts: list[npt.NDArray[np.uint8]] = []
    for part in layers:
        if part is None:
            return None
        parts.append(part)
    panels, lines = len(parts[0]), max(part.shape[1] for part in parts)
    out = aligned((len(parts), panels // 2, 2 * lines * LINE), np.uint8)
    for layer in range(len(parts)):
        pairs = parts.pop(0).reshape(panels // 2, -1)  # none is held twice for longer than it takes
        out[layer, :, : pairs.shape[1]] = pairs
    return out.reshape(-1, panels, lines, LINE)


def expanded(compact: npt.NDArray[np.uint8], words: int) -> npt.NDArray[np.uint32]:
    """What `compacted` made ``compact [P, lines, 64]`` of: ``[P, words, 16]``."""
    panels = aligned((len(compact), words, OUTPUTS), np.uint32)
    header = _header_bytes(words // WORDS_OF_UNIT)
    _read(compact.reshape(len(compact) // 2, -1), header, panels)
    return panels
