"""The token of the largest score plus noise in numba, reading only blocks that can still win."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.blocks import BLOCK
from kernels.exponential.double_precision import exponential
from kernels.noise.cpu import block_draw, block_minimum, noise_ceiling, token_noise
from kernels.penalties.cpu import MINUS_INFINITY, lower_bound

# Where a proposal's probabilities are.
NOWHERE, CERTAIN, SPARSE, DENSE = 0, 1, 2, 3


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
    ids: npt.NDArray[np.int32]  # [K]
    probabilities: npt.NDArray[np.float64]  # [K]


@njit(nogil=True, cache=True)
def log_probability(row, token):  # type: ignore[no-untyped-def]
    scaled = np.float64(row.logits[token]) * row.scale
    distance = 0.0 if scaled == row.top else scaled - row.top
    return distance - row.log_total


@njit(nogil=True, cache=True)
def sparse_probability(ids, probabilities, token):  # type: ignore[no-untyped-def]
    place = lower_bound(ids, 0, ids.size, token)
    return probabilities[place] if place < ids.size and ids[place] == token else 0.0


@njit(nogil=True, cache=True)
def _proposed_probability(proposed, token):  # type: ignore[no-untyped-def]
    if proposed.kind == DENSE:
        return exponential(log_probability(proposed.dense, token))
    if proposed.kind == SPARSE:
        return sparse_probability(proposed.ids, proposed.probabilities, token)
    return 1.0 if proposed.kind == CERTAIN and proposed.token == token else 0.0


@njit(nogil=True, cache=True)
def _visit(row, proposed, residual, block, key, position, token, best):  # type: ignore[no-untyped-def]
    """The better of (token, best) and the tokens of a block. A score is ``l scale``, or the log of
    the ``residual``, plus noise."""
    uniform, winner = block_draw(key, position, np.uint64(block))
    smallest = block_minimum(uniform)
    for candidate in range(block * BLOCK, min(block * BLOCK + BLOCK, row.logits.size)):
        if row.logits[candidate] == MINUS_INFINITY:
            continue
        score = np.float64(row.logits[candidate]) * row.scale
        if residual:
            left = exponential(log_probability(row, candidate))
            left -= _proposed_probability(proposed, candidate)
            if left <= 0.0:
                continue
            score = math.log(left)
        noise = token_noise(key, position, candidate, smallest, winner)
        score += np.float64(noise)
        if score > best or (score == best and candidate < token):
            best = score
            token = candidate
    return token, best


@njit(nogil=True, cache=True)
def race(row, proposed, residual, maxima, key, position):  # type: ignore[no-untyped-def]
    """The token that `kernels.draw` draws from a whole row, given the largest of every 64 logits;
    or, of a ``residual``, one drawn from ``max(0, p - q)``. -1 where there is none."""
    likely = np.argmax(maxima)
    # Not a plain -1: numba would compile what takes it once more, for that number alone. The same
    # goes for the truth values that callers pass.
    token, best = np.int64(-1), -np.inf
    for step in range(-1, maxima.size):
        # The likeliest block sets a high mark, below which most blocks need no noise.
        block = likely if step < 0 else step
        if maxima[block] == MINUS_INFINITY or step == likely:
            continue
        ceiling = np.float64(maxima[block]) * row.scale
        if residual:
            # No residual is above its target's probability.
            ceiling = (0.0 if ceiling == row.top else ceiling - row.top) - row.log_total
        uniform, _ = block_draw(key, position, np.uint64(block))
        if ceiling + noise_ceiling(uniform) >= best:
            token, best = _visit(row, proposed, residual, block, key, position, token, best)
    return token
