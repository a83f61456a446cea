"""The tokens of a row that top-k and min-p can keep, found by ceilings of blocks.

A level is an adjusted logit: all tokens that reach it are collected from the blocks whose ceiling
does. Ceilings suggest a level that few blocks reach; where the tokens there are not enough, since
adjustments lower many, a lower level is tried.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.decision.maxima import greater, rank
from lexshard.kernels.decision.row_search import (
    ALL,
    HOT,
    LOWEST,
    TAIL,
    least_logit,
    reaching,
    visit,
)
from lexshard.kernels.decision.winner import best_token
from lexshard.kernels.draw.cpu import draw_row
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key


@njit(nogil=True, cache=True)
def ranks_of(ceilings):  # type: ignore[no-untyped-def]
    """int32 numbers that order like the ceilings."""
    bits = ceilings.view(np.int32)
    ranks = np.empty(bits.size, np.int32)
    for block in range(bits.size):
        ranks[block] = rank(bits[block])
    return ranks


@njit(nogil=True, cache=True)
def count_reaching(ranks, least):  # type: ignore[no-untyped-def]
    count = 0
    for block in range(ranks.size):
        count += ranks[block] >= least
    return count


@njit(nogil=True, cache=True)
def level_of_blocks(ranks, wanted):  # type: ignore[no-untyped-def]
    """A level that at least ``wanted`` blocks reach, and hardly more; LOWEST where there are fewer.

    Bisection: a pass over the ranks is a handful of vector operations.
    """
    if wanted >= ranks.size:
        return LOWEST
    low, high = np.int64(ranks.min()), np.int64(ranks.max()) + 1
    enough = wanted + wanted // 16 + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count = count_reaching(ranks, np.int32(middle))
        if count < wanted:
            high = middle
        else:
            low = middle
            if count <= enough:
                break
    return greater(np.int32(rank(np.int32(low))).view(np.float32), LOWEST)


@njit(nogil=True, cache=True)
def collect(search, a, level, part):  # type: ignore[no-untyped-def]
    """The tokens of one part that reach the level, in order of id, and their adjusted logits."""
    blocks = np.empty(search.ceilings.size, np.int64)
    count = reaching(search.ceilings, level, blocks)
    ids, values = np.empty(count * BLOCK, np.int32), np.empty(count * BLOCK, np.float32)
    found = visit(search, a, blocks, count, part, level, ids, values)
    return ids[:found], values[:found]


@njit(nogil=True, cache=True)
def _merged(ids, values, more_ids, more_values):  # type: ignore[no-untyped-def]
    """Two sorted lists as one."""
    size = ids.size + more_ids.size
    merged_ids, merged_values = np.empty(size, np.int32), np.empty(size, np.float32)
    left = right = 0
    for place in range(size):
        if right == more_ids.size or (left < ids.size and ids[left] < more_ids[right]):
            merged_ids[place], merged_values[place] = ids[left], values[left]
            left += 1
        else:
            merged_ids[place], merged_values[place] = more_ids[right], more_values[right]
            right += 1
    return merged_ids, merged_values


@njit(nogil=True, cache=True)
def _kth_largest(values, k):  # type: ignore[no-untyped-def]
    keys = np.empty(values.size, np.int64)
    for index in range(values.size):
        keys[index] = order_key(values[index])
    return key_value(kth_largest_key(keys, keys.size, k))


@njit(nogil=True, cache=True)
def _reach(search, a, level, k):  # type: ignore[no-untyped-def]
    """All tokens that reach the level, sorted by id; with ``k``, all that can be among the k best
    of them."""
    if search.hot_ids.size == 0 or k == 0:
        return collect(search, a, level, ALL)
    ids, values = collect(search, a, level, HOT)
    if k <= ids.size:
        level = _kth_largest(values, k)
    more_ids, more_values = collect(search, a, level, TAIL)
    return _merged(ids, values, more_ids, more_values)


@njit(nogil=True, cache=True)
def draw_truncated(search, a, controls):  # type: ignore[no-untyped-def]
    """The token of a row with top-k or min-p (and perhaps top-p), -1 where all are excluded."""
    row = search.row
    k, log_min_p = controls.top_k[row], controls.log_min_p[row]
    lowest = LOWEST
    if log_min_p > -np.inf:
        token, best = best_token(search, a)
        if token < 0:
            return token
        scale = controls.inverse_temperature[row]
        lowest = least_logit(np.float64(best) * scale + log_min_p, scale)
    level = lowest
    ranks = ranks_of(search.ceilings)
    # A few more blocks than tokens: some of the best may be lowered.
    wanted = k + k // 8 + 2
    while True:
        if k > 0:
            level = greater(level_of_blocks(ranks, wanted), lowest)
        ids, values = _reach(search, a, level, k)
        if level == lowest or ids.size >= k:
            return draw_row(ids, values, controls, row)
        wanted += 2 * (k - ids.size) + wanted // 4
