"""What rows draw from their nucleus, in one call: see `actors.head.softmax.nucleus_draws`.

What a row draws from all tokens is what it draws from its nucleus, if it lies there. The bounds of
the screen tell that of most rows, with the logits of a few tokens; those of fp32 products with all
weights, which the rows that are left share, tell nearly always, of tokens that lie outside, too.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.block_vectors import reaching
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.copies import copy_into, own_lines
from lexshard.kernels.linear.cpu import multiply_in_team
from lexshard.kernels.masks import ONE
from lexshard.kernels.mass.cpu import (
    adjust_upper,
    ceilings_of,
    drawn,
    heaviest,
    stands,
    write_upper,
)
from lexshard.kernels.mass.reference import TRIES
from lexshard.kernels.ordered_sums import norms
from lexshard.kernels.penalties.cpu import adjust_tokens
from lexshard.kernels.penalties.reference import Adjustments
from lexshard.kernels.rounding import LARGEST_BOUND, SMALLEST_PRODUCT
from lexshard.kernels.rows.cpu import gather
from lexshard.kernels.search.blocks import slack_factors
from lexshard.kernels.search.candidates import find_candidates
from lexshard.kernels.search.leaders import find_leaders, outline_blocks
from lexshard.kernels.search.thresholds import find_thresholds_of
from lexshard.kernels.search.types import GUMBEL, Needs
from lexshard.kernels.team.jobs import run


@njit(nogil=True, cache=True)
def _logits(ids, padded, weight, adjustments, row):  # type: ignore[no-untyped-def]
    """The adjusted canonical logits of some tokens of ``row``, whose hidden state is ``padded``
    [1, D]."""
    logits = gather(padded, weight, ids, np.array([0, ids.size], np.int64))
    if adjustments.active[row]:
        adjust_tokens(ids, logits, row, adjustments)
    return logits


@njit(nogil=True, cache=True)
def _judge_part(  # type: ignore[no-untyped-def]
    rank, size, found, raw, leading, bounds, padded, weight, needs, adjustments, top_p, answers
):
    """Fills ``answers`` of every ``size``-th row: whether what it draws is a member of its nucleus,
    if it draws from one, and how many more logits that took."""
    ids, offsets, largest = found
    estimates, row_slack, block_slack, slack = bounds
    members, weighed = answers
    for row in range(rank, top_p.size, size):
        if needs.kind[row] != GUMBEL or top_p[row] >= 1.0:
            continue
        own = ids[offsets[row] : offsets[row + 1]]
        logits = raw[offsets[row] : offsets[row + 1]].copy()
        if adjustments.active[row]:
            adjust_tokens(own, logits, row, adjustments)
        scale = needs.inverse_temperature[row]
        place = drawn(own, logits, needs.key[row], needs.position[row], scale)
        members[row] = False
        if place < 0:
            continue
        limits = (estimates[row], row_slack, slack[row])
        ceilings = ceilings_of(*limits, block_slack, adjustments, row, leading[row])
        known = heaviest(*limits, adjustments, row, ceilings)
        weighed[row] = known.size
        exact = _logits(known, padded[row : row + 1], weight, adjustments, row)
        token = (top_p[row], own[place], logits[place], largest[row], ceilings)
        members[row] = stands(*limits, adjustments, row, scale, *token, known, exact, True)


@njit(nogil=True, cache=True)
def _of_row(needs, adjustments, row):  # type: ignore[no-untyped-def]
    """What one row needs, alone, and its adjustments."""
    one, ends = slice(row, row + 1), slice(row, row + 2)
    return Needs(
        needs.kind[one],
        needs.k[one],
        needs.log_min_p[one],
        needs.key[one],
        needs.position[one],
        needs.inverse_temperature[one],
    ), Adjustments(
        adjustments.active[one],
        adjustments.repetition[one],
        adjustments.frequency[one],
        adjustments.presence[one],
        adjustments.tables,
        adjustments.table[one],
        adjustments.bias_ids,
        adjustments.bias_values,
        adjustments.bias_offsets[ends],
        adjustments.banned,
        adjustments.banned_offsets[ends],
        adjustments.masks,
        adjustments.mask[one],
    )


@njit(nogil=True, cache=True)
def _better(bounds, adjustments, token, logit):  # type: ignore[no-untyped-def]
    """The adjustments of one row with a mask of the tokens that may be better than one."""
    values, row_slack, _, slack = bounds
    factors, upper = slack_factors(slack[0]), np.empty(BLOCK, np.float32)
    own, active, size = values[0], adjustments.active[0], row_slack.shape[1]
    words = np.zeros((1, (size + BLOCK - 1) // BLOCK), np.uint64)
    for block in range(words.shape[1]):
        write_upper(own, row_slack, factors, block, upper)
        if active:
            adjust_upper(upper, block, size, 0, adjustments)
        words[0, block] = reaching(upper, logit)
    words[0, token // BLOCK] &= ~(ONE << np.uint64(token % BLOCK))
    return Adjustments(
        np.ones(1, np.bool_),
        adjustments.repetition,
        adjustments.frequency,
        adjustments.presence,
        adjustments.tables,
        adjustments.table,
        adjustments.bias_ids,
        adjustments.bias_values,
        adjustments.bias_offsets,
        adjustments.banned,
        adjustments.banned_offsets,
        words,
        np.zeros(1, np.int64),
    )


@njit(nogil=True, cache=True)
def _searched(team, bounds, padded, weight, needs, adjustments):  # type: ignore[no-untyped-def]
    """The candidates of one row, a bound on every upper bound, the maxima of blocks, the best of
    the leaders, and how many these were."""
    values, row_slack, block_slack, slack = bounds
    every, vocabulary = np.empty(0, np.int32), row_slack.shape[1]
    by_block = every.size == 0
    rows = (every, by_block, vocabulary, needs, adjustments)
    maxima = np.empty((1, (vocabulary + BLOCK - 1) // BLOCK), np.float32)
    noise = np.empty(maxima.shape, np.float64)
    outline_blocks(values, *rows, 0, maxima.shape[1], maxima, noise)
    leaders, first = find_leaders(team, 1, values, row_slack, *rows, maxima, noise)
    exact = _logits(leaders, padded, weight, adjustments, 0)
    thresholds = find_thresholds_of(leaders, exact, first, needs)
    ids, _, largest = find_candidates(
        team, 1, values, row_slack, slack, block_slack, *rows, thresholds, maxima, noise
    )
    best = np.float64(exact.max()) if exact.size else -np.inf
    return ids, largest[0], maxima[0], best, leaders.size


@njit(nogil=True, cache=True)
def _draw(team, bounds, padded, weight, needs, adjustments, top_p):  # type: ignore[no-untyped-def]
    """The token that one row draws from its nucleus, -1 where ``bounds`` do not tell, its logit
    before any processor, a bound on every upper bound, the best logit that is known, and how many
    logits that took: what `actors.head.softmax.nucleus_draws` does with tight bounds."""
    values, row_slack, block_slack, slack = bounds
    ids, largest, maxima, best, _ = _searched(team, bounds, padded, weight, needs, adjustments)
    nothing = (np.int32(-1), np.float32(0.0), largest, best, ids.size)
    if 2 * ids.size > row_slack.shape[1]:
        return nothing
    scale = needs.inverse_temperature[0]
    row = (adjustments, 0)
    ceilings = ceilings_of(values[0], row_slack, slack[0], block_slack, *row, maxima)
    known = heaviest(values[0], row_slack, slack[0], *row, ceilings)
    exact = _logits(known, padded, weight, *row)
    computed = ids.size + known.size
    limits = (values[0], row_slack, slack[0], *row, scale, top_p)
    logits = _logits(ids, padded, weight, *row)
    for left in range(TRIES - 1, -1, -1):
        place = drawn(ids, logits, needs.key[0], needs.position[0], scale)
        if place < 0:
            return nothing
        token, logit = ids[place], logits[place]
        told = (*limits, token, logit, largest, ceilings, known, exact)
        if stands(*told, True):
            own = ids[place : place + 1]
            raw = gather(padded, weight, own, np.array([0, 1], np.int64))[0]
            if not adjustments.active[0]:
                best = np.float64(raw)
            return token, raw, largest, best, computed
        if left == 0 or not stands(*told, False):
            return nothing
        masked = _better(bounds, adjustments, token, logit)
        found, _, _, _, leading = _searched(team, bounds, padded, weight, needs, masked)
        better = _logits(found, padded, weight, *row)
        computed += leading + found.size
        place = drawn(found, better, needs.key[0], needs.position[0], scale)
        if place < 0:
            return nothing
        if better[place] < logit or (better[place] == logit and found[place] > token):
            return nothing
        ids, logits = found[place : place + 1], better[place : place + 1]
    return nothing


@njit(nogil=True, cache=True)
def _draw_part(  # type: ignore[no-untyped-def]
    rank, size, team, left, values, dense, slack, padded, weight, needs, adjustments, top_p, answers
):
    """Fills ``answers`` of every ``size``-th of the rows that are ``left``."""
    row_slack, block_slack = dense
    tokens, raw, largest, best, computed = answers
    for index in range(rank, left.size, size):
        row = left[index]
        own, adjusted = _of_row(needs, adjustments, row)
        bounds = (values[index : index + 1], row_slack, block_slack, slack[index : index + 1])
        state = padded[row : row + 1]
        found = _draw(team, bounds, state, weight, own, adjusted, top_p[row])
        tokens[index], raw[index], largest[index], best[index], computed[index] = found


@njit(nogil=True, cache=True)
def _dense_slack(states, limits):  # type: ignore[no-untyped-def]
    """The slack [N, 3] of fp32 products with all weights, and whether they mean anything: see
    `actors.head.screens.DenseScreen`."""
    slack = np.zeros((states.shape[0], 3))
    lengths = norms(states)
    for row in range(states.shape[0]):
        if not lengths[row] * limits[1] < LARGEST_BOUND:
            return slack, False
        slack[row, 1], slack[row, 2] = limits[0] * lengths[row], SMALLEST_PRODUCT
    return slack, True


@njit(nogil=True, cache=True)
def draw_from_nuclei(  # type: ignore[no-untyped-def]
    team, size, hidden, padded, weight, dense, found, leading, bounds, needs, adjustments, top_p
):
    """Of rows with the candidates that are ``found``, in which rows are certain of what they draw:
    the candidates, whether each is certain, how many more logits that took, and whether it took
    products with all weights, of ``dense``; then its only candidate is what it draws. ``leading``
    are the maxima of blocks."""
    ids, raw, offsets, largest, best = found
    panels, dense_row_slack, dense_block_slack, limits = dense
    count = top_p.size
    members, weighed = np.ones(count, np.bool_), np.zeros(count, np.int64)
    again = np.zeros(count, np.bool_)
    certain = (members, weighed, again)
    if not ((needs.kind == GUMBEL) & (top_p < 1.0)).any():
        return ids, raw, offsets, certain
    asked = (padded, weight, needs, adjustments, top_p)
    candidates = (ids, offsets, largest)
    run(team, size, _judge_part, (candidates, raw, leading, bounds, *asked, certain[:2]))
    left = np.flatnonzero(~members)
    if left.size == 0 or panels.size == 0:
        return ids, raw, offsets, certain
    states = own_lines(left.size, hidden.shape[1])
    for index in range(left.size):
        copy_into(states[index], hidden[left[index]])
    slack, known = _dense_slack(states, limits)
    if not known:
        return ids, raw, offsets, certain
    values = own_lines(left.size, panels.shape[0] * panels.shape[2])
    multiply_in_team(team, size, states, panels, values)
    tokens, logits = np.empty(left.size, np.int32), np.empty(left.size, np.float32)
    most, highest = np.empty(left.size), np.empty(left.size)
    computed = np.empty(left.size, np.int64)
    answers = (tokens, logits, most, highest, computed)
    slacks = (dense_row_slack, dense_block_slack)
    run(team, size, _draw_part, (team, left, values, slacks, slack, *asked, answers))
    for index in range(left.size):
        row = left[index]
        again[row], members[row] = True, tokens[index] >= 0
        weighed[row], largest[row], best[row] = computed[index] - 1, most[index], highest[index]
    kept = np.empty(ids.size + left.size, np.int32)
    kept_raw, ends, end = np.empty(kept.size, np.float32), np.zeros(count + 1, np.int64), 0
    for row in range(count):
        if again[row]:
            index = np.searchsorted(left, row)
            kept[end], kept_raw[end] = tokens[index], logits[index]
            end += 1
        else:
            for place in range(offsets[row], offsets[row + 1]):
                kept[end], kept_raw[end] = ids[place], raw[place]
                end += 1
        ends[row + 1] = end
    return kept[:end].copy(), kept_raw[:end].copy(), ends, certain
