"""Guesses tested by bounds in numba: two fast sums, then only blocks that can hold a candidate."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.block_maxima import block_maxima
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.noise.cpu import (
    block_draw,
    block_minimum,
    noise_ceiling,
    noise_of,
    token_noise,
)
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.rounding import NOISE_ROUNDING
from lexshard.kernels.verify.cpu import acceptance
from lexshard.kernels.verify.normalizer import (
    LN_2,
    LOG_MARGIN,
    TOP_MARGIN,
    fast_total,
    is_bounded,
)
from lexshard.kernels.verify.types import (
    OPEN,
    REPLACED,
    STANDS,
    BoundedRow,
    Finding,
    ProposedGuess,
)

GAP, GAP_PER_UNIT = 1e-9, 2.0**-48  # of large terms per unit
# Beyond so many candidates every logit is as good.
MOST_CANDIDATES = 512


@njit(nogil=True, cache=True)
def _log_mass(row, scale, token, side):  # type: ignore[no-untyped-def]
    """The log of the row's mass, on the safe ``side`` of it: -1 below, 1 above."""
    shift, total = fast_total(row, scale, row[token])
    if not is_bounded(shift, scale) or not total > 0.0:
        return side * np.inf
    top = np.float64(shift) * LN_2
    return top + math.log(total) + side * (LOG_MARGIN + TOP_MARGIN * abs(top))


@njit(nogil=True, cache=True)
def _log_proposed(guess, token):  # type: ignore[no-untyped-def]
    if guess.logits.size:
        return np.float64(guess.logits[token]) * guess.inverse_temperature - guess.log_total
    return 0.0 if token == guess.token else -np.inf


@njit(nogil=True, cache=True)
def _left(score, taken):  # type: ignore[no-untyped-def]
    """``log(exp(score) - exp(taken))``, ``-inf`` where nothing is left."""
    if taken == -np.inf:
        return score
    distance = taken - score
    return score + math.log(-math.expm1(distance)) if distance < 0.0 else -np.inf


@njit(nogil=True, cache=True)
def _keep(ids, scores, count, least):  # type: ignore[no-untyped-def]
    """Those of the first ``count`` whose score reaches ``least``; how many they are."""
    kept = 0
    for index in range(count):
        if scores[index] >= least:
            ids[kept], scores[kept] = ids[index], scores[index]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _candidates(row, guess, log_mass, key, gap):  # type: ignore[no-untyped-def]
    """The tokens that can take the guess's place; none where there are too many, or where it is
    not certain that any can."""
    lower, upper, scale = row
    position = np.uint64(guess.position)
    maxima = np.empty((upper.size + BLOCK - 1) // BLOCK, np.float32)
    block_maxima(upper, maxima)
    bounds = np.empty(maxima.size, np.float64)
    for block in range(maxima.size):
        uniform, _ = block_draw(key, position, np.uint64(block))
        bounds[block] = np.float64(maxima[block]) * scale + noise_ceiling(uniform)
    likely = np.argmax(bounds)
    ids, scores = np.empty(MOST_CANDIDATES, np.int32), np.empty(MOST_CANDIDATES, np.float64)
    count, best = 0, -np.inf
    for step in range(-1, maxima.size):
        # The likeliest block sets a high mark, below which most blocks need no visit.
        block = likely if step < 0 else step
        if step == likely or maxima[block] == MINUS_INFINITY or bounds[block] < best - gap:
            continue
        uniform, winner = block_draw(key, position, np.uint64(block))
        smallest = block_minimum(uniform)
        largest_noise = NOISE_ROUNDING - math.log(smallest)
        for token in range(block * BLOCK, min(block * BLOCK + BLOCK, upper.size)):
            high = np.float64(upper[token]) * scale
            if high == -np.inf or high + largest_noise < best - gap:
                continue
            log_q = _log_proposed(guess, token)
            high = _left(high, log_q + log_mass[0] - gap)
            if high == -np.inf:
                continue
            noise = np.float64(token_noise(key, position, token, smallest, winner))
            if high + noise < best - gap:
                continue
            low = _left(np.float64(lower[token]) * scale, log_q + log_mass[1] + gap)
            best = max(best, low + noise)
            if count == ids.size:
                count = _keep(ids, scores, count, best - gap)
                if count == ids.size:
                    return ids[:0]
            ids[count], scores[count] = token, high + noise
            count += 1
    if best == -np.inf:
        return ids[:0]
    return np.sort(ids[: _keep(ids, scores, count, best - gap)])


@njit(nogil=True, cache=True)
def _gap(one, other, log_mass):  # type: ignore[no-untyped-def]
    """Above what float64 loses in any of these sums and logarithms, and in `kernels.verify`."""
    return GAP + GAP_PER_UNIT * (abs(one) + abs(other) + abs(log_mass[0]) + abs(log_mass[1]))


@njit(nogil=True, cache=True)
def _try_guess(row, guess):  # type: ignore[no-untyped-def]
    lower, upper, scale = row
    nothing = np.empty(0, np.int32)
    log_mass = (
        _log_mass(lower, scale, guess.token, -1.0),
        _log_mass(upper, scale, guess.token, 1.0),
    )
    log_q = _log_proposed(guess, guess.token)
    own = np.float64(upper[guess.token]) * scale
    if math.isinf(log_mass[0]) or math.isinf(log_mass[1]) or math.isinf(log_q):
        return OPEN, log_mass, nothing
    gap = _gap(0.0 if own == -np.inf else own, log_q, log_mass)
    uniform, residual_key = acceptance(np.uint64(guess.key), np.uint64(guess.position))
    log_uniform = math.log(uniform)
    if log_uniform < own - log_q - log_mass[1] - gap:
        return STANDS, log_mass, nothing
    if not log_uniform > own - log_q - log_mass[0] + gap:
        return OPEN, log_mass, nothing
    ids = _candidates(row, guess, log_mass, residual_key, gap)
    return REPLACED if ids.size else OPEN, log_mass, ids


@njit(nogil=True, cache=True)
def _replacement(logits, ids, log_mass, scale, guess):  # type: ignore[no-untyped-def]
    _, key = acceptance(np.uint64(guess.key), np.uint64(guess.position))
    gap = _gap(np.float64(logits.max()) * scale, 0.0, log_mass)
    token, least, most, rival = np.int64(-1), -np.inf, -np.inf, -np.inf
    for index in range(ids.size):
        candidate = np.int64(ids[index])
        score = np.float64(logits[index]) * scale
        log_q = _log_proposed(guess, candidate)
        noise = np.float64(noise_of(key, np.uint64(guess.position), candidate))
        high = _left(score, log_q + log_mass[0] - gap) + noise
        low = _left(score, log_q + log_mass[1] + gap) + noise
        if low > least:
            rival = max(rival, most)
            token, least, most = candidate, low, high
        else:
            rival = max(rival, high)
    return token if rival < least - gap else np.int64(-1)


def try_guess(row: BoundedRow, guess: ProposedGuess) -> Finding:
    """What the bounds of ``row`` say of ``guess``, whose own logit they enclose exactly
    (``lower[token] == upper[token]``).

    OPEN where they are too loose, where a bound is infinite above, where nothing may be left to
    take the guess's place, or where there are more candidates than are worth a look.
    """
    return Finding(*_try_guess(row, _typed(guess)))


def replacement(
    logits: npt.NDArray[np.float32], finding: Finding, row: BoundedRow, guess: ProposedGuess
) -> int:
    """The token that takes the guess's place, given the ``logits`` [K] of the finding's ``ids``; -1
    where the bounds on the row's mass are too loose to tell."""
    arguments = (finding.ids, finding.log_mass, row.inverse_temperature, _typed(guess))
    return int(_replacement(logits, *arguments))


def _typed(guess: ProposedGuess) -> ProposedGuess:
    """With one type each, so that numba compiles once."""
    return guess._replace(
        token=int(guess.token),
        inverse_temperature=float(guess.inverse_temperature),
        log_total=float(guess.log_total),
        key=np.uint64(guess.key),  # type: ignore[arg-type]
        position=np.uint64(guess.position),  # type: ignore[arg-type]
    )
