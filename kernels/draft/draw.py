"""The draw of a guess over rows of the draft head in numba: noise only where it can still win.

As `kernels.draw` draws, but rows come cluster by cluster, chunk by chunk, in any order: what is
kept between them is the best token so far and its score. Where a sequence truncates, all logits
are kept, for which tokens stay is known at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.block_maxima import block_maxima
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.noise.cpu import SIX, block_draw, noise_ceiling, noise_of
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.truncate.cpu import largest, truncate_row

BLOCK_BITS = np.int32(SIX)
# How far below the best the tokens lie that are sorted out first, in nats: mostly top-k are nearer.
NEAR = 8.0


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
    maxima: npt.NDArray[np.float32]  # [rows offered at once / 64] scratch
    # Of rows that are truncated: what was offered, and where in the head it stands.
    held: npt.NDArray[np.int64]  # [A] how much, -1 where nothing need be held
    held_places: npt.NDArray[np.int32]  # [A, rows of the head]
    held_logits: npt.NDArray[np.float32]  # [A, rows of the head]


@njit(nogil=True, cache=True)
def drawn_rows(rows, tokens, panels, held):  # type: ignore[no-untyped-def]
    """Memory for draws of ``rows`` rows from ids below ``tokens``, ``panels`` at a time, of which
    ``held`` are kept where they are truncated."""
    return DrawnRows(
        np.empty(rows, np.float64),
        np.empty(rows, np.uint64),
        np.empty(rows, np.uint64),
        np.empty((rows, (tokens + BLOCK - 1) // BLOCK), np.float64),
        np.empty(rows, np.float64),
        np.empty(rows, np.int64),
        np.empty(rows, np.float64),
        np.empty(rows, np.int64),
        np.empty((panels * PANEL + BLOCK - 1) // BLOCK, np.float32),
        np.empty(rows, np.int64),
        np.empty((rows, held * PANEL), np.int32),
        np.empty((rows, held * PANEL), np.float32),
    )


@njit(nogil=True, cache=True)
def _fill_ceilings(key, position, ceilings):  # type: ignore[no-untyped-def]
    # Nothing but this loop: several blocks at a time.
    for block in range(ceilings.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        ceilings[block] = noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def begin_row(drawn, row, scale, key, position, truncated):  # type: ignore[no-untyped-def]
    """Nothing has competed for the row yet; whether it is ``truncated`` before the draw."""
    drawn.scale[row], drawn.key[row], drawn.position[row] = scale, key, position
    drawn.token[row], drawn.score[row], drawn.seen[row] = -1, -np.inf, 0
    drawn.held[row] = 0 if truncated and scale > 0.0 else -1
    if scale > 0.0:
        ceilings = drawn.ceilings[row]
        _fill_ceilings(drawn.key[row], drawn.position[row], ceilings)
        highest = ceilings[0]
        for block in range(ceilings.size):
            highest = highest if highest > ceilings[block] else ceilings[block]
        drawn.highest_ceiling[row] = highest


@njit(nogil=True, cache=True)
def _exclude_fillers(logits, ids):  # type: ignore[no-untyped-def]
    """What is no token is not drawn; how many are."""
    count = 0
    for index in range(ids.size):
        filler = ids[index] < 0
        logits[index] = MINUS_INFINITY if filler else logits[index]
        count += 1 - filler
    return count


@njit(nogil=True, cache=True)
def _offer_greedy(logits, ids, highest, drawn, row):  # type: ignore[no-untyped-def]
    if highest < drawn.score[row]:
        return
    for start in range(0, ids.size, BLOCK):
        if drawn.maxima[start // BLOCK] != highest:
            continue
        for index in range(start, min(start + BLOCK, ids.size)):
            if logits[index] == highest and (
                highest > drawn.score[row] or ids[index] < drawn.token[row]
            ):
                drawn.token[row], drawn.score[row] = ids[index], highest


@njit(nogil=True, cache=True)
def _first_of(logits, highest, maxima):  # type: ignore[no-untyped-def]
    """Where the highest logit stands first."""
    index = 0
    while maxima[index // BLOCK] != highest:
        index += BLOCK
    while logits[index] != highest:
        index += 1
    return index


@njit(nogil=True, cache=True)
def _compete(logits, ids, start, stop, scale, key, position, ceilings, token, best):  # type: ignore[no-untyped-def]
    """The better of (token, best) and the tokens from ``start`` to ``stop``."""
    for index in range(start, stop):
        candidate = ids[index]
        scaled = np.float64(logits[index]) * scale
        if candidate < 0 or scaled + ceilings[candidate >> BLOCK_BITS] < best:
            continue
        score = scaled + np.float64(noise_of(key, position, candidate))
        if score > best or (score == best and candidate < token):
            token, best = np.int64(candidate), score
    return token, best


@njit(nogil=True, cache=True)
def _hold(logits, ids, first, drawn, row):  # type: ignore[no-untyped-def]
    count = drawn.held[row]
    places, held = drawn.held_places[row], drawn.held_logits[row]
    for index in range(ids.size):
        if ids[index] >= 0:
            places[count], held[count] = first + index, logits[index]
            count += 1
    drawn.held[row] = count


@njit(nogil=True, cache=True)
def offer(logits, ids, first, drawn, row):  # type: ignore[no-untyped-def]
    """Let the tokens ``ids`` with ``logits``, the head's rows from ``first`` on, compete for a row.

    Fillers have id -1; their logits are overwritten.
    """
    drawn.seen[row] += _exclude_fillers(logits, ids)
    if drawn.held[row] >= 0:
        _hold(logits, ids, first, drawn, row)
        return
    scale, maxima = drawn.scale[row], drawn.maxima
    highest = block_maxima(logits, maxima)
    if highest == MINUS_INFINITY:
        return
    if scale == 0.0:
        _offer_greedy(logits, ids, highest, drawn, row)
        return
    token, best = drawn.token[row], drawn.score[row]
    highest_ceiling = drawn.highest_ceiling[row]
    if np.float64(highest) * scale + highest_ceiling < best:
        return
    key, position, ceilings = drawn.key[row], drawn.position[row], drawn.ceilings[row]
    # The likeliest token sets a high mark, below which most tokens need no noise.
    likely = _first_of(logits, highest, maxima)
    token, best = _compete(
        logits, ids, likely, likely + 1, scale, key, position, ceilings, token, best
    )
    for start in range(0, ids.size, BLOCK):
        if np.float64(maxima[start // BLOCK]) * scale + highest_ceiling >= best:
            stop = min(start + BLOCK, ids.size)
            token, best = _compete(
                logits, ids, start, stop, scale, key, position, ceilings, token, best
            )
    drawn.token[row], drawn.score[row] = token, best


@njit(nogil=True, cache=True)
def _near(logits, least, near):  # type: ignore[no-untyped-def]
    """Where ``logits`` are at least ``least``: how many there are, written to ``near``."""
    count = 0
    for index in range(logits.size):
        near[count] = index
        count += logits[index] >= least
    return count


@njit(nogil=True, cache=True)
def settle(drawn, row, head_ids, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    """Truncate what a row holds and draw from what is left, whose places in the head are returned:
    nothing where no token was offered, nor of a row that is not truncated."""
    count = max(drawn.held[row], 0)
    places, logits = drawn.held_places[row, :count], drawn.held_logits[row, :count]
    if count == 0:
        return places
    scale = drawn.scale[row]
    highest = largest(logits)
    near = np.empty(count + 1, np.int64)
    found = 0
    if top_k > 0:
        found = _near(logits, highest - np.float32(NEAR / scale), near)
    if found < min(top_k, count) or top_k == 0:
        found = _near(logits, MINUS_INFINITY, near)
    near = near[:found]
    # Equals stay by id, and clusters come in any order.
    for index in range(1, found):
        if head_ids[places[near[index]]] < head_ids[places[near[index - 1]]]:
            near = near[np.argsort(head_ids[places[near]])]
            break
    places, logits = places[near], logits[near]
    keep = np.empty(found, np.bool_)
    truncate_row(logits, scale, top_k, top_p, log_min_p, keep)
    kept = np.flatnonzero(keep)
    places, logits = places[kept], logits[kept]
    drawn.token[row], drawn.score[row] = _compete(
        logits,
        head_ids[places],
        0,
        kept.size,
        scale,
        drawn.key[row],
        drawn.position[row],
        drawn.ceilings[row],
        drawn.token[row],
        drawn.score[row],
    )
    return places
