"""See `kernels.certified`: its parts are the kernels of the folders around it."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

import lexshard.kernels.screen.vnni as vnni
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.penalties.cpu import adjust
from lexshard.kernels.rows.cpu import gather
from lexshard.kernels.rows.lanes import LANES
from lexshard.kernels.screen.cpu import PANEL, screen_bytes, screen_signed_bytes
from lexshard.kernels.screen.hidden import EIGHT_BIT_LOSS, EIGHT_BIT_ROWS, quantize
from lexshard.kernels.screen.types import LARGEST_EIGHT_BITS, LARGEST_INTEGER
from lexshard.kernels.search.candidates import find_candidates
from lexshard.kernels.search.leaders import find_leaders
from lexshard.kernels.search.thresholds import find_thresholds_of
from lexshard.kernels.search.types import Needs
from lexshard.kernels.team.jobs import run

# Candidates of a row that threads have room for, besides twice those that are asked for.
LEAST_ROOM = 512


@njit(nogil=True, cache=True)
def _quantized(hidden, direction, limits, largest, values, results):  # type: ignore[no-untyped-def]
    """Fills ``values`` and ``results`` as `kernels.screen.hidden.quantize` does, of integers up to
    ``largest``; whether all hidden states are finite."""
    count, width = values.shape
    return quantize(
        hidden,
        direction,
        np.empty(0, np.int16),
        np.empty(0, np.float32),
        np.empty((0, 0)),
        np.empty((0, 0, 0), np.float32),
        np.empty(0, np.float32),
        False,
        np.float64(largest),
        limits[0] - math.sqrt(width) / 2.0 - 1.0,
        limits[1],
        values,
        np.empty((count, 0), np.int32),
        results,
    )


@njit(nogil=True, cache=True)
def _screen_sixteen_bits(  # type: ignore[no-untyped-def]
    rank, size, values, scale, products, hidden, step, share, out
):
    first, last = out.shape[1] * rank // size, out.shape[1] * (rank + 1) // size
    screen_bytes(values, scale, products, hidden, step, share, out, first, last)


@njit(nogil=True, cache=True)
def _screen_eight_bits(  # type: ignore[no-untyped-def]
    rank, size, values, scale, products, hidden, starts, step, share, out
):
    first, last = out.shape[1] * rank // size, out.shape[1] * (rank + 1) // size
    screen_signed_bytes(values, scale, products, hidden, starts, step, share, out, first, last)


@njit(nogil=True, cache=True)
def _screen(  # type: ignore[no-untyped-def]
    team, size, hidden, values, scale, products, direction, limits, estimates, slack
):
    """Fills ``estimates`` [N, V] and ``slack`` [N, 3]; whether they mean anything."""
    count, vocabulary = estimates.shape
    integers = np.empty((count, values.shape[1]), np.int16)
    results = np.empty((count, 6))
    eight = vnni.AVAILABLE and count >= EIGHT_BIT_ROWS and vocabulary >= PANEL
    if eight:
        if not _quantized(hidden, direction, limits, LARGEST_EIGHT_BITS, integers, results):
            return False
        eight = results[:, 5].max() <= EIGHT_BIT_LOSS
    if not eight and not _quantized(hidden, direction, limits, LARGEST_INTEGER, integers, results):
        return False
    step, share = results[:, 0].copy(), results[:, 1].copy()
    for row in range(count):
        slack[row, 0], slack[row, 1], slack[row, 2] = results[row, 3], results[row, 4], 0.0
        # In float32 as the search takes it.
        if not math.isfinite(np.float32(slack[row, 0]) + np.float32(slack[row, 1])):
            return False
    if eight:
        starts = np.empty(count, np.int32)
        for row in range(count):
            total = np.int64(0)
            for column in range(integers.shape[1]):
                total += integers[row, column]
            starts[row] = np.int32(-128 * total)
        size = min(size, vocabulary // PANEL)
        small = integers.astype(np.int8)
        arguments = (values, scale, products, small, starts, step, share, estimates)
        run(team, size, _screen_eight_bits, arguments)
    else:
        run(
            team,
            size,
            _screen_sixteen_bits,
            (values, scale, products, integers, step, share, estimates),
        )
    return True


@njit(nogil=True, cache=True)
def _find(  # type: ignore[no-untyped-def]
    estimates, slack, row_slack, block_slack, hidden, weight, needs, adjustments
):
    """From the estimates of N rows to their candidates: see `certified_candidates`."""
    count, columns = hidden.shape
    vocabulary = weight.shape[0]
    every = np.empty(0, np.int32)
    leaders, first, maxima, noise = find_leaders(
        estimates, row_slack, every, True, vocabulary, needs, adjustments
    )
    padded = np.zeros((count, columns + -columns % LANES))
    padded[:, :columns] = hidden
    exact = gather(padded, weight, leaders, first)
    if adjustments.active.any():
        exact = adjust(leaders, exact, first, adjustments)
    thresholds = find_thresholds_of(leaders, exact, first, needs)
    ids, offsets, largest = find_candidates(
        estimates,
        row_slack,
        slack,
        block_slack,
        every,
        True,
        vocabulary,
        needs,
        adjustments,
        thresholds,
        maxima,
        noise,
    )
    raw = gather(padded, weight, ids, offsets)
    best = np.full(count, -np.inf)
    for row in range(count):
        known, begin = raw, offsets
        if adjustments.active[row]:
            known, begin = exact, first
        for index in range(begin[row], begin[row + 1]):
            best[row] = max(best[row], np.float64(known[index]))
    return ids, raw, offsets, thresholds, largest, best, leaders.size


@njit(nogil=True, cache=True)
def _some_needs(needs, low, high):  # type: ignore[no-untyped-def]
    return Needs(
        needs.kind[low:high],
        needs.k[low:high],
        needs.log_min_p[low:high],
        needs.key[low:high],
        needs.position[low:high],
        needs.inverse_temperature[low:high],
    )


@njit(nogil=True, cache=True)
def _some_adjustments(a, low, high):  # type: ignore[no-untyped-def]
    return Adjustments(
        a.active[low:high],
        a.repetition[low:high],
        a.frequency[low:high],
        a.presence[low:high],
        a.tables,
        a.table[low:high],
        a.bias_ids,
        a.bias_values,
        a.bias_offsets[low : high + 1],
        a.banned,
        a.banned_offsets[low : high + 1],
        a.masks,
        a.mask[low:high],
    )


@njit(nogil=True, cache=True)
def _find_part(  # type: ignore[no-untyped-def]
    rank,
    size,
    estimates,
    slack,
    row_slack,
    block_slack,
    hidden,
    weight,
    needs,
    adjustments,
    own_ids,
    own_raw,
    counts,
    values,
):
    """One thread's rows. ``counts`` [N] is -1 where a row of ``own_ids`` [N, room] is too short."""
    rows, room = own_ids.shape
    low, high = rows * rank // size, rows * (rank + 1) // size
    if low == high:
        return
    ids, raw, offsets, thresholds, largest, best, leaders = _find(
        estimates[low:high],
        slack[low:high],
        row_slack,
        block_slack,
        hidden[low:high],
        weight,
        _some_needs(needs, low, high),
        _some_adjustments(adjustments, low, high),
    )
    for row in range(low, high):
        start, stop = offsets[row - low], offsets[row - low + 1]
        counts[row] = stop - start if stop - start <= room else -1
        for index in range(counts[row]):
            own_ids[row, index] = ids[start + index]
            own_raw[row, index] = raw[start + index]
        values[0, row], values[1, row] = thresholds[row - low], largest[row - low]
        values[2, row] = best[row - low]
        values[3, row] = leaders if row == low else 0


@njit(nogil=True, cache=True)
def _find_together(  # type: ignore[no-untyped-def]
    team, size, estimates, slack, row_slack, block_slack, hidden, weight, needs, adjustments
):
    """`_find`, its rows shared out; how many candidates there are is -1 where that was not known
    to be so many."""
    rows = hidden.shape[0]
    room = min(weight.shape[0], LEAST_ROOM + 2 * needs.k.max())
    own_ids = np.empty((rows, room), np.int32)
    own_raw = np.empty((rows, room), np.float32)
    counts, values = np.zeros(rows, np.int64), np.zeros((4, rows))
    run(
        team,
        size,
        _find_part,
        (
            estimates,
            slack,
            row_slack,
            block_slack,
            hidden,
            weight,
            needs,
            adjustments,
            own_ids,
            own_raw,
            counts,
            values,
        ),
    )
    offsets = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        offsets[row + 1] = offsets[row] + max(0, counts[row])
    ids, raw = np.empty(offsets[rows], np.int32), np.empty(offsets[rows], np.float32)
    for row in range(rows):
        for index in range(counts[row]):
            ids[offsets[row] + index] = own_ids[row, index]
            raw[offsets[row] + index] = own_raw[row, index]
    leaders = np.int64(values[3].sum())
    known = counts.min() >= 0
    return known, (ids, raw, offsets, values[0].copy(), values[1].copy(), values[2].copy(), leaders)


@njit(nogil=True, cache=True)
def certified_candidates(  # type: ignore[no-untyped-def]
    team,
    size,
    hidden,
    weight,
    values,
    scale,
    row_slack,
    block_slack,
    products,
    direction,
    limits,
    needs,
    adjustments,
):
    """Whether estimates mean anything, and then the fields of `kernels.certified.Certified`."""
    count = hidden.shape[0]
    estimates = np.empty((count, weight.shape[0]), np.float32)
    slack = np.empty((count, 3))
    if not _screen(
        team, size, hidden, values, scale, products, direction, limits, estimates, slack
    ):
        none, nothing = np.empty(0), np.zeros(1, np.int64)
        empty = (np.empty(0, np.int32), np.empty(0, np.float32), nothing, none, none, none, 0)
        return False, empty
    if size > 1 and count > 1:
        enough, found = _find_together(
            team, size, estimates, slack, row_slack, block_slack, hidden, weight, needs, adjustments
        )
        if enough:
            return True, found
    return True, _find(estimates, slack, row_slack, block_slack, hidden, weight, needs, adjustments)
