"""Top-p alone: the nucleus of a whole softmax, of which only blocks that matter are weighed.

The nucleus depends on the mass of all tokens, an integer. Blocks are weighed from the highest
ceiling down; what the others can hold at most follows from their ceilings. It is enough to know
the total between two bounds when both make the same nucleus.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.copies import copy_into
from lexshard.kernels.decision.maxima import greater, rank
from lexshard.kernels.decision.row_search import ALL, least_logit
from lexshard.kernels.decision.survivors import collect, count_reaching, level_of_blocks, ranks_of
from lexshard.kernels.decision.winner import best_token, draw_token
from lexshard.kernels.penalties.cpu import adjust_block
from lexshard.kernels.search.selection import key_value
from lexshard.kernels.truncate.cpu import nucleus_end, target_mass, weigh

# A token so many nats below the best has no mass: 2**42 exp(-29.9) rounds to 0.
MASSLESS = 29.9
# Ranks of numbers that differ by a thousandth, roughly.
CLOSE = 1 << 13
# Blocks weighed first.
FIRST = 48
# Adjacent blocks weighed at once.
RUN = 64


@njit(nogil=True, cache=True)
def _sum(masses):  # type: ignore[no-untyped-def]
    total = 0
    for index in range(masses.size):
        total += masses[index]
    return total


@njit(nogil=True, cache=True)
def _known_sum(masses, known):  # type: ignore[no-untyped-def]
    total = 0
    for index in range(masses.size):
        total += masses[index] if known[index] else 0
    return total


@njit(nogil=True, cache=True)
def _bound_masses(ceilings, scale, best, lowest, masses, known):  # type: ignore[no-untyped-def]
    """What every block can hold at most; known to be nothing below the lowest level of a mass."""
    reached = np.empty(ceilings.size, np.float32)
    for block in range(ceilings.size):
        # No token is above the best, whatever adjustments have left of a block's ceiling.
        reached[block] = best if ceilings[block] > best else ceilings[block]
    weigh(reached, scale, np.float64(best) * scale, masses)
    for block in range(masses.size):
        known[block] = ceilings[block] < lowest
        # One more each: the exponential's last bit need not grow with its argument.
        masses[block] = 0 if known[block] else BLOCK * (masses[block] + 1)


@njit(nogil=True, cache=True)
def _weigh_blocks(search, a, scale, top, level, masses, known):  # type: ignore[no-untyped-def]
    """Replaces the bounds of all blocks that reach the level by their masses."""
    ceilings, logits, was_read = search.ceilings, search.logits, search.was_read
    row, active = search.row, search.active
    run_values, run_masses = np.empty(RUN * BLOCK, np.float32), np.empty(RUN * BLOCK, np.int64)
    first = 0
    while first < ceilings.size:
        last = first
        while (
            last < ceilings.size
            and last < first + RUN
            and ceilings[last] >= level
            and not known[last]
        ):
            last += 1
        if last > first:
            start, stop = first * BLOCK, min(last * BLOCK, search.size)
            values = run_values[: stop - start]
            copy_into(values, logits[start:stop])
            if active:
                adjust_block(values, start, row, a)
            weigh(values, scale, top, run_masses)
            for block in range(first, last):
                end = min(block * BLOCK + BLOCK, stop)
                masses[block] = _sum(run_masses[block * BLOCK - start : end - start])
                known[block] = True
                was_read[block] = True
        first = max(last, first + 1)


@njit(nogil=True, cache=True)
def _mass_reaching(ranks, least, masses):  # type: ignore[no-untyped-def]
    mass = 0
    for block in range(ranks.size):
        mass += masses[block] if ranks[block] >= least else 0
    return mass


@njit(nogil=True, cache=True)
def _ranks_holding(ranks, masses, target):  # type: ignore[no-untyped-def]
    """Two ranks close together: the blocks that reach the lower one hold a mass (or all blocks
    reach it), those that reach the upper one do not."""
    low, high = np.int64(ranks.min()), np.int64(ranks.max()) + 1
    while high - low > CLOSE:
        middle = (low + high) >> 1
        if _mass_reaching(ranks, np.int32(middle), masses) < target:
            high = middle
        else:
            low = middle
    return np.int32(low), high


@njit(nogil=True, cache=True)
def _tokens_holding(  # type: ignore[no-untyped-def]
    search, a, scale, top, ranks, wanted, level, target
):
    """The best tokens, which hold the target mass or else reach the level: ids, logits, masses.

    Tried with more blocks than ``wanted``, then more and more.
    """
    while True:
        # A third of the blocks is as good as all: a second attempt would cost more.
        wanted = wanted + wanted // 2 + 8 if 3 * wanted < ranks.size else ranks.size
        own_level = greater(level_of_blocks(ranks, wanted), level)
        ids, values = collect(search, a, own_level, ALL)
        masses = np.empty(ids.size, np.int64)
        weigh(values, scale, top, masses)
        if own_level == level or _sum(masses) >= target:
            return ids, values, masses


@njit(nogil=True, cache=True)
def _last_equal(ids, values, value, count):  # type: ignore[no-untyped-def]
    """The id of the ``count``-th token with a logit."""
    for index in range(ids.size):
        if values[index] == value:
            count -= 1
            if count == 0:
                return np.int64(ids[index])
    return -1


@njit(nogil=True, cache=True)
def draw_nucleus(search, a, controls):  # type: ignore[no-untyped-def]
    """The token of a row with top-p alone, -1 where all are excluded."""
    row = search.row
    scale, top_p = controls.inverse_temperature[row], controls.top_p[row]
    token, best = best_token(search, a)
    if token < 0:
        return token
    top = np.float64(best) * scale
    lowest = least_logit(top - MASSLESS, scale)
    ranks = ranks_of(search.ceilings)
    block_masses, known = np.empty(ranks.size, np.int64), np.empty(ranks.size, np.bool_)
    _bound_masses(search.ceilings, scale, best, lowest, block_masses, known)
    wanted = FIRST
    boundary, boundary_mass = np.empty(1, np.float32), np.empty(1, np.int64)
    while True:
        level = greater(level_of_blocks(ranks, wanted), lowest)
        _weigh_blocks(search, a, scale, top, level, block_masses, known)
        total = _sum(block_masses)
        # The targets for the least and for the largest total there can be.
        least = target_mass(top_p, max(_known_sum(block_masses, known), 1))
        most = target_mass(top_p, total)
        low, high = _ranks_holding(ranks, block_masses, most)
        # No token above the rank ``high`` is where the nucleus ends.
        boundary[0] = best
        if high <= ranks_of(boundary)[0]:
            boundary[0] = np.int32(rank(np.int32(high))).view(np.float32)
        weigh(boundary, scale, top, boundary_mass)
        # Both targets end at one token only if they differ by no more than the mass it can have.
        if most - least <= boundary_mass[0] + 1:
            ids, values, masses = _tokens_holding(
                search, a, scale, top, ranks, count_reaching(ranks, low), level, most
            )
            if _sum(masses) >= most:
                end, ties, held = nucleus_end(values, masses, least)
                # The fewest tokens for one target hold the other too: both have the same nucleus.
                if held >= most:
                    value = key_value(end)
                    last = _last_equal(ids, values, value, ties)
                    key, position = controls.key[row], controls.position[row]
                    return draw_token(search, a, key, position, scale, value, last)
        # What is left out then is likely to make no difference.
        enough, _ = _ranks_holding(ranks, block_masses, total - boundary_mass[0] // 4)
        wanted = max(2 * wanted, count_reaching(ranks, enough))
