"""The draw of a guess over rows of the draft head in numba: noise only where it can still win.

As `kernels.draw` draws, but rows come cluster by cluster, chunk by chunk, in any order: what is
kept between them is the best token so far and its score.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.decision.maxima import LOWEST_RANK, rank
from kernels.linear.tile import PANEL
from kernels.noise.cpu import SIX, block_draw, noise_ceiling, noise_of
from kernels.penalties.cpu import MINUS_INFINITY

BLOCK_BITS = np.int32(SIX)


class DrawnRows(NamedTuple):
    """A draw under way, row by row; the arrays may have more rows than are drawn for."""

    scale: npt.NDArray[np.float64]  # [A]
    key: npt.NDArray[np.uint64]  # [A]
    position: npt.NDArray[np.uint64]  # [A]
    ceilings: npt.NDArray[np.float64]  # [A, blocks of 64 ids] bounds on the noise
    highest_ceiling: npt.NDArray[np.float64]  # [A]
    token: npt.NDArray[np.int64]  # [A] the best so far, -1 where there is none
    score: npt.NDArray[np.float64]  # [A]
    seen: npt.NDArray[np.int64]  # [A] tokens that competed
    maxima: npt.NDArray[np.float32]  # [panels] scratch


@njit(nogil=True, cache=True)
def _fill_ceilings(key, position, ceilings):  # type: ignore[no-untyped-def]
    # Nothing but this loop: several blocks at a time.
    for block in range(ceilings.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        ceilings[block] = noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def begin_row(drawn, row, scale, key, position):  # type: ignore[no-untyped-def]
    """Nothing has competed for the row yet."""
    drawn.scale[row], drawn.key[row], drawn.position[row] = scale, key, position
    drawn.token[row], drawn.score[row], drawn.seen[row] = -1, -np.inf, 0
    if scale > 0.0:
        ceilings = drawn.ceilings[row]
        _fill_ceilings(drawn.key[row], drawn.position[row], ceilings)
        highest = ceilings[0]
        for block in range(ceilings.size):
            highest = highest if highest > ceilings[block] else ceilings[block]
        drawn.highest_ceiling[row] = highest


@njit(nogil=True, cache=True)
def _exclude_fillers(logits, ids, first, last):  # type: ignore[no-untyped-def]
    """What is no token is not drawn; how many are."""
    count = 0
    for index in range(first * PANEL, last * PANEL):
        filler = ids[index] < 0
        logits[index] = MINUS_INFINITY if filler else logits[index]
        count += 1 - filler
    return count


@njit(nogil=True, cache=True)
def _panel_maxima(logits, first, last, maxima):  # type: ignore[no-untyped-def]
    """Writes the largest of every 16 logits; returns the largest of all."""
    # Not a slice for each panel: making one takes as long as the search in it.
    bits = logits.view(np.int32).reshape(logits.size // PANEL, PANEL)
    highest = LOWEST_RANK
    for panel in range(first, last):
        maximum = LOWEST_RANK
        for lane in range(PANEL):
            maximum = max(maximum, rank(bits[panel, lane]))
        maxima[panel] = np.int32(rank(maximum)).view(np.float32)
        highest = max(highest, maximum)
    return np.int32(rank(highest)).view(np.float32)


@njit(nogil=True, cache=True)
def _offer_greedy(logits, ids, first, last, highest, drawn, row):  # type: ignore[no-untyped-def]
    if highest < drawn.score[row]:
        return
    for panel in range(first, last):
        if drawn.maxima[panel] != highest:
            continue
        for index in range(panel * PANEL, (panel + 1) * PANEL):
            if logits[index] == highest and (
                highest > drawn.score[row] or ids[index] < drawn.token[row]
            ):
                drawn.token[row], drawn.score[row] = ids[index], highest


@njit(nogil=True, cache=True)
def _try(logit, token, drawn, row):  # type: ignore[no-untyped-def]
    """Let one token compete."""
    scaled = np.float64(logit) * drawn.scale[row]
    if scaled + drawn.ceilings[row, token >> BLOCK_BITS] < drawn.score[row]:
        return
    noise = noise_of(drawn.key[row], drawn.position[row], token)
    score = scaled + np.float64(noise)
    if score > drawn.score[row] or (score == drawn.score[row] and token < drawn.token[row]):
        drawn.token[row], drawn.score[row] = token, score


@njit(nogil=True, cache=True)
def _contenders(logits, ids, first, scale, ceilings, best):  # type: ignore[no-untyped-def]
    """How many tokens of a panel could still win."""
    count = 0
    for index in range(first, first + PANEL):
        block = max(ids[index], 0) >> BLOCK_BITS  # the logit of a filler is -inf
        count += np.float64(logits[index]) * scale + ceilings[block] >= best
    return count


@njit(nogil=True, cache=True)
def offer(logits, ids, first, last, drawn, row):  # type: ignore[no-untyped-def]
    """Let the tokens ``ids`` with ``logits`` of the panels ``first`` to ``last - 1`` compete.

    Ids of a panel ascend; fillers come last and have id -1, and their logits are overwritten.
    """
    drawn.seen[row] += _exclude_fillers(logits, ids, first, last)
    maxima, scale = drawn.maxima, drawn.scale[row]
    highest = _panel_maxima(logits, first, last, maxima)
    if highest == MINUS_INFINITY:
        return
    if scale == 0.0:
        _offer_greedy(logits, ids, first, last, highest, drawn, row)
        return
    if np.float64(highest) * scale + drawn.highest_ceiling[row] < drawn.score[row]:
        return
    # The likeliest token sets a high mark, below which most tokens need no noise.
    likely = first
    while maxima[likely] != highest:
        likely += 1
    likely *= PANEL
    while logits[likely] != highest:
        likely += 1
    _try(logits[likely], ids[likely], drawn, row)
    ceilings = drawn.ceilings[row]
    for panel in range(first, last):
        start = panel * PANEL
        top = np.float64(maxima[panel]) * scale
        if top + drawn.highest_ceiling[row] < drawn.score[row]:
            continue
        block = ids[start] >> BLOCK_BITS
        if block == ids[start + PANEL - 1] >> BLOCK_BITS:
            if top + ceilings[block] < drawn.score[row]:
                continue
        elif _contenders(logits, ids, start, scale, ceilings, drawn.score[row]) == 0:
            continue
        for index in range(start, start + PANEL):
            if logits[index] > MINUS_INFINITY:
                _try(logits[index], ids[index], drawn, row)
