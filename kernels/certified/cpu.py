"""See `kernels.certified`: its parts are the kernels of the folders around it."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

import lexshard.kernels.screen.vnni as vnni
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.certified.nucleus import draw_from_nuclei
from lexshard.kernels.copies import copy_into, own_lines
from lexshard.kernels.penalties.cpu import adjust
from lexshard.kernels.rows.cpu import gather
from lexshard.kernels.rows.lanes import LANES
from lexshard.kernels.screen.cpu import (
    PANEL,
    refine_rows,
    screen_bytes,
    screen_nibbles,
    screen_signed_bytes,
)
from lexshard.kernels.screen.hidden import EIGHT_BIT_LOSS, EIGHT_BIT_ROWS, quantize
from lexshard.kernels.screen.types import LARGEST_EIGHT_BITS, LARGEST_INTEGER, WORTH_REFINING
from lexshard.kernels.search.candidates import find_candidates, narrow
from lexshard.kernels.search.leaders import find_leaders, outline_blocks
from lexshard.kernels.search.thresholds import find_thresholds_of
from lexshard.kernels.team.jobs import run


@njit(nogil=True, cache=True)
def _quantized(hidden, direction, limits, nibbles, largest, values, starts, results):  # type: ignore[no-untyped-def]
    """Fills ``values`` and ``results`` as `kernels.screen.hidden.quantize` does, of integers up to
    ``largest``; whether all hidden states are finite."""
    return quantize(
        hidden,
        direction,
        np.empty(0, np.int16),
        np.empty(0, np.float32),
        np.empty((0, 0)),
        np.empty((0, 0, 0), np.float32),
        np.empty(0, np.float32),
        nibbles,
        np.float64(largest),
        limits[0] - math.sqrt(values.shape[1]) / 2.0 - 1.0,
        limits[1],
        values,
        starts,
        results,
    )


@njit(nogil=True, cache=True)
def _outline(out, outline, first, last):  # type: ignore[no-untyped-def]
    """What the search is told of the blocks of estimates that were just made."""
    needs, adjustments, maxima, noise = outline
    every = np.empty(0, np.int32)
    blocks = (first // BLOCK, (last + BLOCK - 1) // BLOCK)
    rows = (every, every.size == 0, out.shape[1], needs, adjustments)
    outline_blocks(out, *rows, *blocks, maxima, noise)


@njit(nogil=True, cache=True)
def _own(rank, size, vocabulary):  # type: ignore[no-untyped-def]
    """The tokens of a thread, from the first, up to the second: whole blocks."""
    blocks = (vocabulary + BLOCK - 1) // BLOCK
    return BLOCK * (blocks * rank // size), min(BLOCK * (blocks * (rank + 1) // size), vocabulary)


@njit(nogil=True, cache=True)
def _screen_sixteen_bits(  # type: ignore[no-untyped-def]
    rank, size, values, scale, products, hidden, step, share, out, outline
):
    first, last = _own(rank, size, out.shape[1])
    screen_bytes(values, scale, products, hidden, step, share, out, first, last)
    _outline(out, outline, first, last)


@njit(nogil=True, cache=True)
def _screen_eight_bits(  # type: ignore[no-untyped-def]
    rank, size, values, scale, products, hidden, starts, step, share, out, outline
):
    first, last = _own(rank, size, out.shape[1])
    screen_signed_bytes(values, scale, products, hidden, starts, step, share, out, first, last)
    _outline(out, outline, first, last)


@njit(nogil=True, cache=True)
def _screen_high(  # type: ignore[no-untyped-def]
    rank, size, high, multipliers, scale, products, hidden, starts, step, share, out, outline
):
    first, last = _own(rank, size, out.shape[1])
    weights = (high, multipliers, scale, products)
    screen_nibbles(*weights, hidden, starts, step, share, out, first, last)
    _outline(out, outline, first, last)


@njit(nogil=True, cache=True)
def _refine_part(  # type: ignore[no-untyped-def]
    rank, size, planes, scale, products, words, starts, step, share, ids, offsets, out
):
    high, multipliers, low = planes
    first, last = ids.size * rank // size, ids.size * (rank + 1) // size
    weights = (high, low, multipliers, scale, products)
    refine_rows(*weights, words, starts, step, share, ids, offsets, out, first, last)


@njit(nogil=True, cache=True)
def _means_nothing(slack, results):  # type: ignore[no-untyped-def]
    """Fills ``slack`` [N, 3] from what `_quantized` found; whether it is too large in float32, as
    the search takes it, of a row."""
    for row in range(slack.shape[0]):
        slack[row, 0], slack[row, 1], slack[row, 2] = results[row, 3], results[row, 4], 0.0
        if not math.isfinite(np.float32(slack[row, 0]) + np.float32(slack[row, 1])):
            return True
    return False


@njit(nogil=True, cache=True)
def _screen_by_nibbles(  # type: ignore[no-untyped-def]
    team,
    size,
    hidden,
    planes,
    scale,
    products,
    direction,
    limits,
    quantized,
    estimates,
    slack,
    outline,
):
    """`_screen` by an int4 tier; fills what is ``quantized``, too, with which a few estimates are
    bettered."""
    high, multipliers, _ = planes
    words, starts, step, share = quantized
    results = np.empty((words.shape[0], 6))
    if not _quantized(hidden, direction, limits, True, LARGEST_INTEGER, words, starts, results):
        return False
    if _means_nothing(slack, results):
        return False
    copy_into(step, results[:, 0])
    copy_into(share, results[:, 1])
    weights = (high, multipliers, scale, products)
    run(team, size, _screen_high, (*weights, words, starts, 16.0 * step, share, estimates, outline))
    return True


@njit(nogil=True, cache=True)
def _screen(  # type: ignore[no-untyped-def]
    team, size, hidden, values, scale, products, direction, limits, estimates, slack, outline
):
    """Fills ``estimates`` [N, V], ``slack`` [N, 3] and the arrays of ``outline``; whether they mean
    anything."""
    count, vocabulary = estimates.shape
    integers = own_lines(count, values.shape[1] // 2).view(np.int16)
    none, results = np.empty((count, 0), np.int32), np.empty((count, 6))
    states = (hidden, direction, limits, False)
    eight = vnni.AVAILABLE and count >= EIGHT_BIT_ROWS and vocabulary >= PANEL
    if eight:
        if not _quantized(*states, LARGEST_EIGHT_BITS, integers, none, results):
            return False
        eight = results[:, 5].max() <= EIGHT_BIT_LOSS
    if not eight and not _quantized(*states, LARGEST_INTEGER, integers, none, results):
        return False
    if _means_nothing(slack, results):
        return False
    step, share = results[:, 0].copy(), results[:, 1].copy()
    if eight:
        starts = np.empty(count, np.int32)
        for row in range(count):
            total = np.int64(0)
            for column in range(integers.shape[1]):
                total += integers[row, column]
            starts[row] = np.int32(-128 * total)
        size = max(1, min(size, vocabulary // BLOCK))
        small = own_lines(count, values.shape[1] // 4).view(np.int8)
        for row in range(count):
            copy_into(small[row], integers[row])
        arguments = (values, scale, products, small, starts, step, share, estimates, outline)
        run(team, size, _screen_eight_bits, arguments)
    else:
        run(
            team,
            size,
            _screen_sixteen_bits,
            (values, scale, products, integers, step, share, estimates, outline),
        )
    return True


@njit(nogil=True, cache=True)
def widest(offsets):  # type: ignore[no-untyped-def]
    """The most candidates of a row."""
    most = 0
    for row in range(offsets.size - 1):
        most = max(most, offsets[row + 1] - offsets[row])
    return most


@njit(nogil=True, cache=True)
def _narrowed(  # type: ignore[no-untyped-def]
    team, size, planes, fine_row_slack, scale, products, quantized, slack, found, search
):
    """What is left of ids and offsets when both planes of an int4 tier have bettered the estimates
    of rows that have many, and of how many tokens of each row they have."""
    ids, offsets = found
    refined = np.zeros(offsets.size - 1, np.int64)
    if fine_row_slack.size == 0 or widest(offsets) <= WORTH_REFINING:
        return ids, offsets, refined
    for row in range(refined.size):
        refined[row] = offsets[row + 1] - offsets[row]
    values, every = np.empty(ids.size, np.float32), np.empty(0, np.int32)
    arguments = (planes, scale, products, *quantized, ids, offsets, values)
    run(team, size, _refine_part, arguments)
    by_block = every.size == 0
    # No block of a list is looked at: any slack of blocks will do.
    better = (values, fine_row_slack, slack, fine_row_slack, every, by_block)
    ids, offsets = narrow(*better, ids, offsets, *search)
    return ids, offsets, refined


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
    multipliers,
    low,
    fine_row_slack,
    panels,
    dense_row_slack,
    dense_block_slack,
    dense_limits,
    needs,
    adjustments,
    top_p,
):
    """Whether estimates mean anything, and then the fields of `kernels.certified.Certified`."""
    count, columns = hidden.shape
    vocabulary = weight.shape[0]
    every = np.empty(0, np.int32)
    by_block = every.size == 0  # a value for the compiler, not a word: the search is compiled once
    estimates = own_lines(count, vocabulary)
    slack = np.empty((count, 3))
    best = np.full(count, -np.inf)
    nibbles = multipliers.size > 0
    wide = own_lines(count if nibbles else 0, values.shape[1]).view(np.int16)
    starts = np.zeros((count, wide.shape[1] // 16), np.int32)
    quantized = (wide, starts, np.empty(count), np.empty(count))
    planes = (values, multipliers, low)
    maxima = np.empty((count, (vocabulary + BLOCK - 1) // BLOCK), np.float32)
    noise = np.empty(maxima.shape, np.float64)
    outline = (needs, adjustments, maxima, noise)
    tier, states = (scale, products, direction, limits), (estimates, slack, outline)
    if nibbles:
        known = _screen_by_nibbles(team, size, hidden, planes, *tier, quantized, *states)
    else:
        known = _screen(team, size, hidden, values, *tier, *states)
    if not known:
        nothing, left = np.zeros(1, np.int64), np.zeros(0, np.int64)
        none = (np.empty(0, np.bool_), left, np.empty(0, np.bool_), left)
        return False, (every, np.empty(0, np.float32), nothing, best, best, best, 0, *none)
    rows = (every, by_block, vocabulary, needs, adjustments)
    leaders, first = find_leaders(team, size, estimates, row_slack, *rows, maxima, noise)
    padded = np.zeros((count, columns + -columns % LANES))
    for row in range(count):
        copy_into(padded[row], hidden[row])
    exact = gather(padded, weight, leaders, first)
    if adjustments.active.any():
        exact = adjust(leaders, exact, first, adjustments)
    thresholds = find_thresholds_of(leaders, exact, first, needs)
    ids, offsets, largest = find_candidates(
        team, size, estimates, row_slack, slack, block_slack, *rows, thresholds, maxima, noise
    )
    search = (needs, adjustments, thresholds)
    weights = (planes, fine_row_slack, scale, products)
    ids, offsets, refined = _narrowed(
        team, size, *weights, quantized, slack, (ids, offsets), search
    )
    raw = gather(padded, weight, ids, offsets)
    for row in range(count):
        logits, begin = raw, offsets
        if adjustments.active[row]:
            logits, begin = exact, first
        for index in range(begin[row], begin[row + 1]):
            best[row] = max(best[row], np.float64(logits[index]))
    dense = (panels, dense_row_slack, dense_block_slack, dense_limits)
    bounds = (estimates, row_slack, block_slack, slack)
    candidates = (ids, raw, offsets, largest, best)
    asked = (needs, adjustments, top_p)
    ids, raw, offsets, certain = draw_from_nuclei(
        team, size, hidden, padded, weight, dense, candidates, maxima, bounds, *asked
    )
    return True, (
        ids,
        raw,
        offsets,
        thresholds,
        largest,
        best,
        leaders.size,
        *certain,
        refined,
    )
