"""The draw of a guess over rows of the draft head in numba: noise only where it can still win.

As `kernels.draw` draws, but rows come cluster by cluster, chunk by chunk, in any order: what is
kept between them is the best token so far and its score.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.decision.maxima import LOWEST_RANK, rank
from kernels.linear.tile import PANEL
from kernels.noise.cpu import SIX, block_draw, noise_ceiling, noise_of
from kernels.penalties.cpu import MINUS_INFINITY

BLOCK_BITS = np.int32(SIX)


@njit(nogil=True, cache=True)
def fill_ceilings(key, position, ceilings):  # type: ignore[no-untyped-def]
    """A bound on the noise of every block [B] of 64 ids, several blocks at a time."""
    for block in range(ceilings.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        ceilings[block] = noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def exclude_fillers(logits, ids):  # type: ignore[no-untyped-def]
    """What is no token is not drawn."""
    for index in range(ids.size):
        logits[index] = MINUS_INFINITY if ids[index] < 0 else logits[index]


@njit(nogil=True, cache=True)
def _panel_maxima(logits, maxima):  # type: ignore[no-untyped-def]
    """Writes the largest of every 16 logits; returns the largest of all."""
    # Not a slice for each panel: making one takes as long as the search in it.
    bits = logits.view(np.int32).reshape(logits.size // PANEL, PANEL)
    highest = LOWEST_RANK
    for panel in range(bits.shape[0]):
        maximum = LOWEST_RANK
        for lane in range(PANEL):
            maximum = max(maximum, rank(bits[panel, lane]))
        maxima[panel] = np.int32(rank(maximum)).view(np.float32)
        highest = max(highest, maximum)
    return np.int32(rank(highest)).view(np.float32)


@njit(nogil=True, cache=True)
def _greedy(logits, ids, maxima, highest, token, best):  # type: ignore[no-untyped-def]
    """The better of (token, best) and the tokens with the logit ``highest``."""
    if highest < best:
        return token, best
    for panel in range(ids.size // PANEL):
        if maxima[panel] == highest:
            for index in range(panel * PANEL, (panel + 1) * PANEL):
                if logits[index] == highest and (highest > best or ids[index] < token):
                    token, best = np.int64(ids[index]), np.float64(highest)
    return token, best


@njit(nogil=True, cache=True)
def _try(logit, candidate, scale, key, position, ceilings, token, best):  # type: ignore[no-untyped-def]
    """The better of (token, best) and one candidate."""
    scaled = np.float64(logit) * scale
    if scaled + ceilings[candidate >> BLOCK_BITS] < best:
        return token, best
    score = scaled + np.float64(noise_of(key, position, candidate))
    if score > best or (score == best and candidate < token):
        return np.int64(candidate), score
    return token, best


@njit(nogil=True, cache=True)
def offer(logits, ids, scale, key, position, ceilings, maxima, token, best):  # type: ignore[no-untyped-def]
    """The better of (token, best) and the tokens ``ids`` with ``logits``, whole panels of both.

    Fillers have id -1 and logit -inf; the other ids of a panel ascend. ``maxima`` is scratch.
    Starts with (-1, -inf).
    """
    maxima = maxima[: ids.size // PANEL]
    highest = _panel_maxima(logits, maxima)
    if highest == MINUS_INFINITY:
        return token, best
    if scale == 0.0:
        return _greedy(logits, ids, maxima, highest, token, best)
    # The likeliest token sets a high mark, below which most tokens need no noise.
    likely = 0
    while maxima[likely] != highest:
        likely += 1
    likely *= PANEL
    while logits[likely] != highest:
        likely += 1
    token, best = _try(logits[likely], ids[likely], scale, key, position, ceilings, token, best)
    for panel in range(maxima.size):
        first = panel * PANEL
        block = ids[first] >> BLOCK_BITS
        if (
            block == ids[first + PANEL - 1] >> BLOCK_BITS
            and np.float64(maxima[panel]) * scale + ceilings[block] < best
        ):
            continue
        for index in range(first, first + PANEL):
            token, best = _try(
                logits[index], ids[index], scale, key, position, ceilings, token, best
            )
    return token, best
