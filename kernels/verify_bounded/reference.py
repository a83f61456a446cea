"""Guesses tested by bounds, stated plainly: full rows in float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise.reference import gumbel_noise
from lexshard.kernels.verify.reference import acceptance
from lexshard.kernels.verify_bounded.types import (
    OPEN,
    REPLACED,
    STANDS,
    BoundedRow,
    Finding,
    ProposedGuess,
)

# Above what float64 loses in any of these sums and logarithms, here and in `kernels.verify`, and of
# large terms per unit.
GAP, GAP_PER_UNIT = 1e-9, 2.0**-48
# Beyond so many candidates every logit is as good.
MOST_CANDIDATES = 512
NOTHING = np.empty(0, np.int32)

Row = npt.NDArray[np.float64]


def gap_of(*terms: float) -> float:
    return GAP + GAP_PER_UNIT * sum(abs(term) for term in terms if math.isfinite(term))


def try_guess(row: BoundedRow, guess: ProposedGuess) -> Finding:
    scale = row.inverse_temperature
    lower, upper = row.lower.astype(np.float64) * scale, row.upper.astype(np.float64) * scale
    if not -math.inf < upper.max() < math.inf:
        return Finding(OPEN, (-math.inf, math.inf), NOTHING)
    log_mass = (float(np.logaddexp.reduce(lower)), float(np.logaddexp.reduce(upper)))
    log_q = log_proposed(guess, len(upper))
    own = float(upper[guess.token])
    gap = gap_of(own, *log_mass, log_q[guess.token])
    if log_q[guess.token] == -math.inf:
        return Finding(OPEN, log_mass, NOTHING)
    uniform, residual_key = acceptance(guess.key, guess.position)
    log_ratio = own - log_q[guess.token]
    if math.log(uniform) < log_ratio - log_mass[1] - gap:
        return Finding(STANDS, log_mass, NOTHING)
    if not math.log(uniform) > log_ratio - log_mass[0] + gap:
        return Finding(OPEN, log_mass, NOTHING)
    every = np.arange(len(upper))
    least, most = residual_scores(lower, upper, log_q, log_mass, gap)
    noise = gumbel_noise(residual_key, guess.position, every)
    best = (least + noise).max()
    ids = np.flatnonzero(most + noise >= best - gap)
    if best == -np.inf or len(ids) > MOST_CANDIDATES:
        return Finding(OPEN, log_mass, NOTHING)
    return Finding(REPLACED, log_mass, ids.astype(np.int32))


def replacement(
    logits: npt.NDArray[np.float32], finding: Finding, row: BoundedRow, guess: ProposedGuess
) -> int:
    scores = logits.astype(np.float64) * row.inverse_temperature
    log_q = log_proposed(guess, len(row.upper))
    gap = gap_of(float(scores.max()), *finding.log_mass)
    least, most = residual_scores(scores, scores, log_q[finding.ids], finding.log_mass, gap)
    _, residual_key = acceptance(guess.key, guess.position)
    noise = gumbel_noise(residual_key, guess.position, finding.ids)
    best = int(np.argmax(least + noise))
    others = np.delete(most + noise, best)
    if least[best] == -np.inf or not others.max(initial=-np.inf) < least[best] + noise[best] - gap:
        return -1
    return int(finding.ids[best])


def log_proposed(guess: ProposedGuess, size: int) -> Row:
    """``log q`` [V]."""
    if len(guess.logits):
        return guess.logits.astype(np.float64) * guess.inverse_temperature - guess.log_total
    result = np.full(size, -np.inf)
    result[guess.token] = 0.0
    return result


def residual_scores(
    lower: Row, upper: Row, log_q: Row, log_mass: tuple[float, float], gap: float
) -> tuple[Row, Row]:
    """Bounds on ``log(exp(s l) - q Z)``, ``-inf`` where nothing is left."""

    def left(scores: Row, taken: Row) -> Row:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            distance = np.where(taken == -np.inf, -np.inf, taken - scores)
            return np.where(distance < 0, scores + np.log(-np.expm1(distance)), -np.inf)

    return left(lower, log_q + log_mass[1] + gap), left(upper, log_q + log_mass[0] - gap)
