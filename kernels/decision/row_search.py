"""One row of logits, read in blocks of 64 tokens.

A block has a ceiling: no adjusted logit in it is above. Where penalties and bias can only lower it
is the block's largest raw logit; where they raise, what they can make of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.decision.maxima import greater
from lexshard.kernels.penalties.cpu import adjust_token, adjust_tokens, lower_bound, raised

# Which tokens of a block: those of the hot set, the others, or both.
HOT, TAIL, ALL = 0, 1, 2
# The least level there is: excluded tokens, minus infinity, do not reach it.
LOWEST = np.finfo(np.float32).min


class RowSearch(NamedTuple):
    """What the search of one row works on. Loops take these arrays out first: numba counts
    references wherever a field is looked up."""

    logits: npt.NDArray[np.float32]  # [V]
    size: int  # V
    row: int  # of the adjustments
    active: bool  # some logit is adjusted
    lifted: bool  # some logit can be raised
    ceilings: npt.NDArray[np.float32]  # [ceil(V / 64)]
    hot_ids: npt.NDArray[np.int32]  # [H]
    was_read: npt.NDArray[np.bool_]  # [ceil(V / 64)], tokens that are not hot were read


@njit(nogil=True, cache=True)
def _raising_penalties(row, a):  # type: ignore[no-untyped-def]
    return a.table[row] >= 0 and (
        a.repetition[row] < 1.0 or a.frequency[row] < 0.0 or a.presence[row] < 0.0
    )


@njit(nogil=True, cache=True)
def can_lift(row, a):  # type: ignore[no-untyped-def]
    """Whether some adjustment of the row can raise a logit."""
    if not a.active[row]:
        return False
    for index in range(a.bias_offsets[row], a.bias_offsets[row + 1]):
        if a.bias_values[index] > 0.0:
            return True
    return _raising_penalties(row, a)


@njit(nogil=True, cache=True)
def _largest_entry(entries):  # type: ignore[no-untyped-def]
    largest = np.int32(0)
    for index in range(entries.size):
        largest = greater(largest, entries[index])
    return largest


@njit(nogil=True, cache=True)
def lift_ceilings(search, a):  # type: ignore[no-untyped-def]
    """Turns block maxima into ceilings of a row whose adjustments can raise."""
    ceilings, row, size, logits = search.ceilings, search.row, search.size, search.logits
    if _raising_penalties(row, a):
        entries = a.tables[a.table[row]]
        for block in range(ceilings.size):
            start = block * BLOCK
            most = _largest_entry(entries[start : min(start + BLOCK, size)])
            if most > 0:
                ceilings[block] = raised(ceilings[block], row, a, most - 1)
    for index in range(a.bias_offsets[row], a.bias_offsets[row + 1]):
        token = np.int64(a.bias_ids[index])
        if a.bias_values[index] > 0.0 and token < size:
            block = token // BLOCK
            ceilings[block] = greater(ceilings[block], adjust_token(logits[token], token, row, a))


@njit(nogil=True, cache=True)
def reaching(ceilings, level, blocks):  # type: ignore[no-untyped-def]
    """Writes which ceilings reach the level, in order; returns how many."""
    count = 0
    for block in range(ceilings.size):
        if ceilings[block] >= level:
            blocks[count] = block
            count += 1
    return count


@njit(nogil=True, cache=True)
def _append_hot(logits, stop, hot_ids, start, level, ids, values, count):  # type: ignore[no-untyped-def]
    index = lower_bound(hot_ids, 0, hot_ids.size, start)
    while index < hot_ids.size and hot_ids[index] < stop:
        token = np.int64(hot_ids[index])
        value = logits[token]
        if value >= level:
            ids[count] = token
            values[count] = value
            count += 1
        index += 1
    return count


@njit(nogil=True, cache=True)
def _without_hot(hot_ids, ids, values, first, count):  # type: ignore[no-untyped-def]
    """Takes the hot ids out of the lists from ``first`` on. Returns their new length."""
    kept = first
    for index in range(first, count):
        token = ids[index]
        place = lower_bound(hot_ids, 0, hot_ids.size, token)
        if place == hot_ids.size or hot_ids[place] != token:
            ids[kept] = token
            values[kept] = values[index]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def append_reaching(  # type: ignore[no-untyped-def]
    logits, size, hot_ids, block, part, level, ids, values, count
):
    """Appends the tokens of one part of a block whose raw logit reaches the level.

    The lists have room for a block more. Returns their new length.
    """
    start = block * BLOCK
    stop = min(start + BLOCK, size)
    if part == HOT:
        return _append_hot(logits, stop, hot_ids, start, level, ids, values, count)
    first = count
    raw = logits[start:stop]
    for offset in range(raw.size):
        if raw[offset] >= level:
            ids[count] = start + offset
            values[count] = raw[offset]
            count += 1
    return _without_hot(hot_ids, ids, values, first, count) if part == TAIL else count


@njit(nogil=True, cache=True)
def visit(search, a, blocks, count, part, level, ids, values):  # type: ignore[no-untyped-def]
    """Lists the tokens of one part of ``blocks[:count]`` whose adjusted logit reaches the level.

    Returns how many; ``ids`` (sorted if the blocks are) and ``values`` have room for all tokens
    of these blocks.
    """
    logits, size, hot_ids, was_read = search.logits, search.size, search.hot_ids, search.was_read
    raw_level = LOWEST if search.lifted else level
    found = 0
    for index in range(count):
        block = blocks[index]
        found = append_reaching(logits, size, hot_ids, block, part, raw_level, ids, values, found)
        was_read[block] |= part != HOT
    if not search.active:
        return found
    adjust_tokens(ids[:found], values[:found], search.row, a)
    kept = 0
    for index in range(found):
        token, value = ids[index], values[index]
        if value >= level:
            ids[kept] = token
            values[kept] = value
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def least_logit(least, scale):  # type: ignore[no-untyped-def]
    """An fp32 number that every fp32 logit ``l > -inf`` with ``f64(l) scale >= least`` reaches."""
    quotient = least / scale
    if quotient == np.inf:
        return np.float32(quotient)
    # Far more than a division and a conversion can err.
    return greater(np.float32(quotient - (abs(quotient) * 1e-6 + 1e-30)), LOWEST)
