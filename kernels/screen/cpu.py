"""The screens in numba: tiles of weight rows x hidden rows, integers until the last step.

A panel of 16 weight rows (64 of a 1-bit tier) stays in the cache while hidden rows pass over it.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit

import lexshard.kernels.screen.matrix as matrix
import lexshard.kernels.screen.vnni as vnni
from lexshard.kernels import pool
from lexshard.kernels.copies import own_lines
from lexshard.kernels.linear.matrix import MATRIX, MOST_ROWS
from lexshard.kernels.quantize.layout import PANEL_ROWS
from lexshard.kernels.quantize.tiers import DitheredInt4Tier, Int4Tier, Int8Tier, OneBitTier, Tier
from lexshard.kernels.screen.bits import fill_tables, sum_panel
from lexshard.kernels.screen.hidden import quantize_hidden
from lexshard.kernels.screen.matrix import sum_rows, turned
from lexshard.kernels.screen.tile import BYTE_ROWS, PANEL, ROWS, dot_bytes, dot_nibbles, fetch_row
from lexshard.kernels.screen.types import QuantizedHidden
from lexshard.kernels.screen.vnni import HEIGHT, dot_signed_bytes

__all__ = ["quantize_hidden", "refine", "screen"]

# Below this many products a second thread costs more than it saves.
MULTIPLICATIONS_PER_THREAD = 2_000_000
FETCH_AHEAD = 4  # rows of a refinement
MANY = 12  # hidden rows, from which on matrices of them are faster than vectors
# Weight rows whose sums are scaled together: sixteen at a time, that took the demo 12 us for every
# hidden row, a sixth of a lone one's screen.
STRIP = 128
# A tier of so many bytes stays in a cache, which gives two rows at a time more than one. Memory
# gives two streams half of what it gives one.
CACHED = 2**23
IN_ORDER = ROWS + 1  # hidden rows that a weight row at a time is fast enough for


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_panel(sums, scale, products, step, share, out, first, last):  # type: ignore[no-untyped-def]
    """Sums of the rows ``first`` to ``last - 1`` to estimates."""
    units = scale[first:last]
    for query in range(out.shape[0]):
        totals, target = sums[query], out[query, first:last]
        width = step[query]
        if products.size:
            kept, part = products[first:last], share[query]
            for row in range(last - first):
                value = np.float64(totals[row]) * (np.float64(units[row]) * width)
                target[row] = np.float32(value + part * np.float64(kept[row]))
        else:
            for row in range(last - first):
                target[row] = np.float32(np.float64(totals[row]) * (np.float64(units[row]) * width))


@njit(nogil=True, cache=True)
def _dot_few(values, start, whole, hidden, query, sums, strip):  # type: ignore[no-untyped-def]
    """Two or three hidden rows from ``query`` on; the panel is not fetched yet if they are all."""
    three = hidden.shape[0] - query == 3
    for row in range(start, whole, BYTE_ROWS):
        place = row - strip
        if three and query == 0:
            dot_bytes(3, BYTE_ROWS, 1, values, row, hidden, query, sums, place)
        elif three:
            dot_bytes(3, BYTE_ROWS, 0, values, row, hidden, query, sums, place)
        elif query == 0:
            dot_bytes(2, BYTE_ROWS, 1, values, row, hidden, query, sums, place)
        else:
            dot_bytes(2, BYTE_ROWS, 0, values, row, hidden, query, sums, place)


@njit(nogil=True, cache=True)
def _screen_in_order(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, step, share, out, first, last
):
    """A few hidden rows read memory as fast as a plain loop if they meet a weight row after the
    other, and one further on is fetched. From a cache one hidden row reads two at a time."""
    count = hidden.shape[0]
    sums = own_lines(count, STRIP).view(np.int32)
    for start in range(first, last, STRIP):
        stop = min(start + STRIP, last)
        paired = stop - (stop - start) % 2 if values.size <= CACHED and count == 1 else start
        for row in range(start, paired, 2):
            dot_bytes(1, 2, 0, values, row, hidden, 0, sums, row - start)
        for row in range(paired, stop):
            if count == 1:
                dot_bytes(1, 1, 1, values, row, hidden, 0, sums, row - start)
            elif count == 2:
                dot_bytes(2, 1, 1, values, row, hidden, 0, sums, row - start)
            else:
                dot_bytes(3, 1, 1, values, row, hidden, 0, sums, row - start)
        _scale_panel(sums, scale, products, step, share, out, start, stop)


@njit(nogil=True, cache=True)
def screen_bytes(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, step, share, out, first, last
):
    count = hidden.shape[0]
    if count == 1 or (count <= IN_ORDER and values.size > CACHED):
        _screen_in_order(values, scale, products, hidden, step, share, out, first, last)
        return
    fours = count - count % 4
    sums = own_lines(count, STRIP).view(np.int32)
    for strip in range(first, last, STRIP):
        end = min(strip + STRIP, last)
        for start in range(strip, end, PANEL):
            stop = min(start + PANEL, end)
            whole = stop - (stop - start) % BYTE_ROWS
            for row in range(start, whole if fours else start, BYTE_ROWS):
                dot_bytes(4, BYTE_ROWS, 1, values, row, hidden, 0, sums, row - strip)
            for query in range(4, fours, 4):
                for row in range(start, whole, BYTE_ROWS):
                    dot_bytes(4, BYTE_ROWS, 0, values, row, hidden, query, sums, row - strip)
            for query in range(0, fours, 4):
                for row in range(whole, stop):
                    dot_bytes(4, 1, 0, values, row, hidden, query, sums, row - strip)
            single = start if count - fours == 1 else whole
            if count - fours > 1:
                _dot_few(values, start, whole, hidden, fours, sums, strip)
            for query in range(fours, count):
                for row in range(single, stop):
                    dot_bytes(1, 1, 0, values, row, hidden, query, sums, row - strip)
        _scale_panel(sums, scale, products, step, share, out, strip, end)


@njit(nogil=True, cache=True)
def _screen_by_vectors(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, starts, step, share, out, first, last
):
    count = hidden.shape[0]
    second = count % 4 or 4
    sums = own_lines(count, STRIP).view(np.int32)
    for strip in range(first, last, STRIP):
        end = min(strip + STRIP, last)
        begin = min(strip, end - PANEL)  # what is less than a panel repeats rows of the one before
        for panel in range(strip, end, PANEL):
            start = min(panel, end - PANEL)
            # Half of the following panel is fetched with the first hidden rows and half with the
            # next: all at once, memory would have nothing to do while the others are multiplied.
            for row in range(start, start + PANEL, HEIGHT):
                there, place = row + PANEL, row - begin
                dot_signed_bytes(4, 2, values, there, row, hidden, starts, 0, sums, place)
            for row in range(start, start + PANEL, HEIGHT):
                there, place = row + PANEL + 2, row - begin
                if second == 1:
                    dot_signed_bytes(1, 2, values, there, row, hidden, starts, 4, sums, place)
                elif second == 2:
                    dot_signed_bytes(2, 2, values, there, row, hidden, starts, 4, sums, place)
                elif second == 3:
                    dot_signed_bytes(3, 2, values, there, row, hidden, starts, 4, sums, place)
                else:
                    dot_signed_bytes(4, 2, values, there, row, hidden, starts, 4, sums, place)
            for query in range(4 + second, count, 4):
                for row in range(start, start + PANEL, HEIGHT):
                    place = row - begin
                    dot_signed_bytes(4, 0, values, row, row, hidden, starts, query, sums, place)
        _scale_panel(sums, scale, products, step, share, out, begin, end)


@njit(nogil=True, cache=True)
def _screen_nothing(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, starts, step, share, out, first, last
):
    """Where a processor has no instructions for 8-bit integers, nothing is screened by them."""


@njit(nogil=True, cache=True)
def _screen_by_matrices(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, starts, step, share, out, first, last
):
    columns = turned(hidden)
    width = MATRIX * columns.shape[0]
    totals, sums = np.empty((MOST_ROWS, width), np.int32), np.empty((width, STRIP), np.int32)
    for start in range(first, last, STRIP):
        stop = min(start + STRIP, last)
        sum_rows(values, start, stop, columns, totals, sums)
        _scale_panel(sums, scale, products, step, share, out, start, stop)


_screen_few = _screen_by_vectors if vnni.AVAILABLE else _screen_nothing
_screen_many = _screen_by_matrices if matrix.AVAILABLE else _screen_few


@njit(nogil=True, cache=True)
def screen_signed_bytes(  # type: ignore[no-untyped-def]
    values, scale, products, hidden, starts, step, share, out, first, last
):
    """More than four hidden rows, and at least a panel of weight rows."""
    if hidden.shape[0] < MANY:
        _screen_few(values, scale, products, hidden, starts, step, share, out, first, last)
    else:
        _screen_many(values, scale, products, hidden, starts, step, share, out, first, last)


@njit(nogil=True, cache=True)
def screen_nibbles(  # type: ignore[no-untyped-def]
    nibbles, factors, scale, products, hidden, starts, step, share, out, first, last
):
    count = hidden.shape[0]
    fours = count - count % 4
    sums = np.empty((count, PANEL), np.int32)
    for start in range(first, last, PANEL):
        stop = min(start + PANEL, last)
        whole = stop - (stop - start) % ROWS
        for row in range(start, whole if fours else start, ROWS):
            place = row - start
            dot_nibbles(4, ROWS, 1, nibbles, factors, row, hidden, starts, 0, sums, place)
        for query in range(4, fours, 4):
            for row in range(start, whole, ROWS):
                place = row - start
                dot_nibbles(4, ROWS, 0, nibbles, factors, row, hidden, starts, query, sums, place)
        for query in range(0, fours, 4):
            for row in range(whole, stop):
                place = row - start
                dot_nibbles(4, 1, 0, nibbles, factors, row, hidden, starts, query, sums, place)
        for query in range(fours, count):
            for row in range(start, stop):
                place = row - start
                dot_nibbles(1, 1, 1, nibbles, factors, row, hidden, starts, query, sums, place)
        _scale_panel(sums, scale, products, step, share, out, start, stop)


@njit(nogil=True, cache=True)
def _screen_bits(  # type: ignore[no-untyped-def]
    signs, multipliers, scale, products, tables, step, share, offset, out, first, last
):
    """The panels ``first`` to ``last - 1``."""
    rows = out.shape[1]
    sums = np.empty(PANEL_ROWS, np.int32)
    for panel in range(first, last):
        start, stop = panel * PANEL_ROWS, min((panel + 1) * PANEL_ROWS, rows)
        for query in range(out.shape[0]):
            sum_panel(signs, multipliers, panel, tables, query, sums)
            target, units = out[query, start:stop], scale[start:stop]
            width, begin = step[query], offset[query]
            if products.size:
                kept, part = products[start:stop], share[query]
                for row in range(stop - start):
                    value = np.float64(sums[row]) * (np.float64(units[row]) * width) + begin
                    target[row] = np.float32(value + part * np.float64(kept[row]))
            else:
                for row in range(stop - start):
                    value = np.float64(sums[row]) * (np.float64(units[row]) * width) + begin
                    target[row] = np.float32(value)


@njit(nogil=True, cache=True)
def refine_rows(  # type: ignore[no-untyped-def]
    high,
    low,
    multipliers,
    scale,
    products,
    hidden,
    starts,
    step,
    share,
    ids,
    offsets,
    out,
    first,
    last,
):
    """Fills ``out`` [total] from ``first`` to ``last - 1``: the estimates of both planes."""
    sums = np.empty((hidden.shape[0], 2), np.int32)
    units = scale.view(np.uint8).reshape(scale.size, 4)
    along = products.view(np.uint8).reshape(products.size, 4)
    for query in range(hidden.shape[0]):
        for index in range(max(first, offsets[query]), min(last, offsets[query + 1])):
            if index + FETCH_AHEAD < ids.size:  # rows are far apart: nothing else foresees them
                later = ids[index + FETCH_AHEAD]
                fetch_row(high, later)
                fetch_row(low, later)
                fetch_row(multipliers, later)
                fetch_row(units, later)
                fetch_row(along, later)
            row = ids[index]
            dot_nibbles(1, 1, 0, high, multipliers, row, hidden, starts, query, sums, 0)
            dot_nibbles(1, 1, 0, low, multipliers, row, hidden, starts, query, sums, 1)
            total = np.int64(16) * np.int64(sums[query, 0]) + np.int64(sums[query, 1])
            value = np.float64(total) * (np.float64(scale[row]) * step[query])
            if products.size:
                value += share[query] * np.float64(products[row])
            out[index] = np.float32(value)


def _products(tier: Tier) -> npt.NDArray[np.float32]:
    return np.empty(0, np.float32) if tier.common is None else tier.common.products


def screen(hidden: QuantizedHidden, tier: Tier) -> npt.NDArray[np.float32]:
    """Estimates [N, V] of integer hidden states."""
    count, rows = len(hidden.step), len(tier.scale)
    out = np.empty((count, rows), np.float32)
    values, step, share = hidden.values, hidden.step, hidden.share
    units, smallest = rows, 1  # of work that threads share, and how many a thread must have
    if isinstance(tier, OneBitTier):
        units = len(tier.signs)
        tables = np.empty((count, values.shape[1] // 8, 64), np.uint8)
        fill_tables(values, tables)
        work = partial(
            _screen_bits,
            tier.signs,
            tier.multipliers,
            tier.scale,
            _products(tier),
            tables,
            step,
            share,
            hidden.offset,
            out,
        )
    elif isinstance(tier, Int8Tier):
        common = (step, share, out)
        weights = (tier.values, tier.scale, _products(tier))
        if values.dtype == np.int8 and vnni.AVAILABLE and count > 4 and rows >= PANEL:
            starts = -128 * values.sum(axis=1, dtype=np.int32)
            work = partial(screen_signed_bytes, *weights, values, starts, *common)
            smallest = PANEL
        else:
            work = partial(screen_bytes, *weights, values.astype(np.int16, copy=False), *common)
    else:
        dithered = isinstance(tier, DitheredInt4Tier)
        nibbles = tier.nibbles if isinstance(tier, DitheredInt4Tier) else tier.high
        work = partial(
            screen_nibbles,
            nibbles.view(np.int8),
            tier.multipliers,
            tier.scale,
            _products(tier),
            values,
            hidden.starts,
            step if dithered else 16.0 * step,
            share,
            out,
        )
    parts = pool.threads() if values.size * rows > MULTIPLICATIONS_PER_THREAD else 1
    parts = min(parts, units // smallest) or 1
    cuts = [units * part // parts for part in range(parts + 1)]
    pool.run([partial(work, first, last) for first, last in pairwise(cuts)])
    return out


def refine(
    hidden: QuantizedHidden,
    tier: Int4Tier,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    """Estimates of both planes for the rows ``ids[offsets[n]:offsets[n + 1]]`` of every ``n``."""
    result = np.empty(len(ids), np.float32)
    refine_rows(
        tier.high.view(np.int8),
        tier.low,
        tier.multipliers,
        tier.scale,
        _products(tier),
        hidden.values,
        hidden.starts,
        hidden.step,
        hidden.share,
        ids,
        offsets,
        result,
        0,
        len(ids),
    )
    return result
