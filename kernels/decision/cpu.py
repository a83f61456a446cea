"""The decision in numba: a whole batch in one call."""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.decision.nucleus import draw_nucleus
from lexshard.kernels.decision.row_search import LOWEST, RowSearch, can_lift, lift_ceilings
from lexshard.kernels.decision.survivors import draw_truncated
from lexshard.kernels.decision.winner import best_token, draw_token
from lexshard.kernels.draw.cpu import draw, draw_row
from lexshard.kernels.masks import count_of, ids_of
from lexshard.kernels.penalties.cpu import adjust, adjust_tokens, lower_bound

# A row that allows fewer than one of so many tokens looks at these, else at blocks of all.
MANY_ALLOWED = 16


@njit(nogil=True, cache=True)
def decide_candidates(ids, raw, offsets, controls, a):  # type: ignore[no-untyped-def]
    return draw(ids, adjust(ids, raw, offsets, a), offsets, controls)


@njit(nogil=True, cache=True)
def _decide_allowed(search, a, controls):  # type: ignore[no-untyped-def]
    """The token of a row that reads the tokens of its mask alone."""
    row = search.row
    ids = ids_of(a.masks[a.mask[row]], search.size)
    values, logits = np.empty(ids.size, np.float32), search.logits
    for index in range(ids.size):
        values[index] = logits[ids[index]]
    adjust_tokens(ids, values, row, a)
    token = draw_row(ids, values, controls, row)
    return token, ids.size - _shared(ids, search.hot_ids)


@njit(nogil=True, cache=True)
def _shared(ids, others):  # type: ignore[no-untyped-def]
    """How many sorted ids are in both lists."""
    shared = 0
    for index in range(ids.size if others.size > 0 else 0):
        place = lower_bound(others, 0, others.size, ids[index])
        shared += place < others.size and others[place] == ids[index]
    return shared


@njit(nogil=True, cache=True)
def _count_visited(was_read, size, hot_ids):  # type: ignore[no-untyped-def]
    """How many tokens stand in the blocks that were read, without hot ids."""
    count = 0
    for block in range(was_read.size):
        if was_read[block]:
            start = block * BLOCK
            stop = min(start + BLOCK, size)
            count += stop - start
            if hot_ids.size > 0:
                first = lower_bound(hot_ids, 0, hot_ids.size, start)
                while first < hot_ids.size and hot_ids[first] < stop:
                    count -= 1
                    first += 1
    return count


@njit(nogil=True, cache=True)
def _decide_row(search, a, controls):  # type: ignore[no-untyped-def]
    row = search.row
    scale = controls.inverse_temperature[row]
    if scale == 0.0:
        return best_token(search, a)[0]
    if controls.top_k[row] > 0 or controls.log_min_p[row] > -np.inf:
        return draw_truncated(search, a, controls)
    if controls.top_p[row] < 1.0:
        return draw_nucleus(search, a, controls)
    key, position = controls.key[row], controls.position[row]
    return draw_token(search, a, key, position, scale, LOWEST, search.size)


@njit(nogil=True, cache=True)
def _is_increasing(ids, size):  # type: ignore[no-untyped-def]
    """Whether token ids are sorted, distinct and below ``size``."""
    faults = 0
    for index in range(1, ids.size):
        faults += ids[index - 1] >= ids[index]
    return faults == 0 and (ids.size == 0 or (ids[0] >= 0 and ids[-1] < size))


@njit(nogil=True, cache=True)
def decide_dense(logits, maxima, controls, a, hot_ids):  # type: ignore[no-untyped-def]
    rows, size = logits.shape
    if not _is_increasing(hot_ids, size):
        raise ValueError("hot_ids must be sorted, distinct and below the vocabulary size")
    tokens = np.empty(rows, np.int64)
    visited = np.zeros(rows, np.int64)
    blocks = maxima.shape[1]
    ceilings = np.empty(blocks, np.float32)
    was_read = np.empty(blocks, np.bool_)
    for row in range(rows):
        was_read[:] = False
        search = RowSearch(
            logits[row],
            size,
            row,
            a.active[row],
            can_lift(row, a),
            ceilings,
            hot_ids,
            was_read,
        )
        masked = a.active[row] and a.mask[row] >= 0
        if masked and count_of(a.masks[a.mask[row]]) * MANY_ALLOWED < size:
            tokens[row], visited[row] = _decide_allowed(search, a, controls)
            continue
        faults = 0
        for block in range(blocks):
            ceiling = maxima[row, block]
            ceilings[block] = ceiling
            faults += ceiling != ceiling
        if faults > 0:
            raise ValueError("a block maximum is NaN: logits must be checked before they come here")
        if search.lifted:
            lift_ceilings(search, a)
        tokens[row] = _decide_row(search, a, controls)
        visited[row] = _count_visited(was_read, size, hot_ids)
    return tokens, visited
