"""The token of the largest score plus noise in numba, reading only blocks that can still win."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.rounding import NOISE_ROUNDING

# Where a proposal's probabilities are.
NOWHERE, CERTAIN, DENSE = 0, 1, 2


class ScaledRow(NamedTuple):
    """Logits and what turns them into probabilities: ``exp(l scale - top - log_total)``."""

    logits: npt.NDArray[np.float32]  # [V]
    scale: float
    top: float
    log_total: float


class ProposedRow(NamedTuple):
    """The proposal of one draft, in the form that ``kind`` says."""

    kind: int
    token: int  # the draft
    dense: ScaledRow


@njit(nogil=True, cache=True)
def log_probability(row, token):  # type: ignore[no-untyped-def]
    scaled = np.float64(row.logits[token]) * row.scale
    distance = 0.0 if scaled == row.top else scaled - row.top
    return distance - row.log_total


@njit(nogil=True, cache=True)
def _proposed_probability(proposed, token):  # type: ignore[no-untyped-def]
    if proposed.kind == DENSE:
        return exponential(log_probability(proposed.dense, token))
    return 1.0 if proposed.kind == CERTAIN and proposed.token == token else 0.0


@njit(nogil=True, cache=True)
def _block_bounds(row, maxima, key, position, bounds):  # type: ignore[no-untyped-def]
    """Writes a bound on every ``log p`` plus noise of each block."""
    for block in range(maxima.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        scaled = np.float64(maxima[block]) * row.scale
        distance = 0.0 if scaled == row.top else scaled - row.top
        bounds[block] = (distance - row.log_total) + noise_ceiling(uniform)


@njit(nogil=True, cache=True)
def _visit(row, proposed, block, margins, key, position, leader):  # type: ignore[no-untyped-def]
    """The leader after the tokens of a block: its token, bounds on its score, and a bound on the
    scores of all others."""
    token, least, most, rival = leader
    margin, margin_q = margins
    grown, shrunk = math.exp(margin), math.exp(-margin)
    grown_q, shrunk_q = math.exp(margin_q), math.exp(-margin_q)
    uniform, winner = block_draw(key, position, np.uint64(block))
    smallest = block_minimum(uniform)
    largest_noise = NOISE_ROUNDING + margin - math.log(smallest)
    for candidate in range(block * BLOCK, min(block * BLOCK + BLOCK, row.logits.size)):
        if row.logits[candidate] == MINUS_INFINITY:
            continue
        score = log_probability(row, candidate)
        # No residual is above its target's probability.
        if score + largest_noise < least:
            continue
        p, q = exponential(score), _proposed_probability(proposed, candidate)
        above, below = p * grown - q * shrunk_q, p * shrunk - q * grown_q
        if above <= 0.0:
            continue
        upper = math.log(above)
        lower = math.log(below) if below > 0.0 else -np.inf
        noise = np.float64(token_noise(key, position, candidate, smallest, winner))
        lower += noise
        upper += noise
        if lower > least or (lower == least and candidate < token):
            rival = max(rival, most)
            token, least, most = np.int64(candidate), lower, upper
        else:
            rival = max(rival, upper)
    return token, least, most, rival


@njit(nogil=True, cache=True)
def race(row, proposed, maxima, bounds, margins, key, position):  # type: ignore[no-untyped-def]
    """The token of the largest ``log max(0, p - q)`` plus noise, given the largest of every 64
    logits; -1 where there is none. And whether it is certain that normalisers without the error
    that they may have (``margins``: of the logs of the target's and the proposal's) give the same.
    Scores that are equal go to the lower token. ``bounds`` [ceil(V / 64)] float64 is scratch.
    """
    _block_bounds(row, maxima, key, position, bounds)
    likely = np.argmax(bounds)
    # Not a plain -1: numba would compile what takes it once more, for that number alone.
    leader = (np.int64(-1), -np.inf, -np.inf, -np.inf)
    for step in range(-1, maxima.size):
        # The likeliest block sets a high mark, below which most blocks need no visit.
        block = likely if step < 0 else step
        if bounds[block] + margins[0] < leader[1] or step == likely:
            continue
        if maxima[block] > MINUS_INFINITY:
            leader = _visit(row, proposed, block, margins, key, position, leader)
    return leader[0], leader[3] < leader[1]
