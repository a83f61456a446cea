"""Verification, stated plainly in float64.

Whether a draft stands, and what replaces it, must not depend on the noise that drew the draft. The
plain noise of `kernels.noise` has the Philox counters ``(position, block, lane, 0)`` with lanes 0
to 16; ``(position, 0, 17, 0)`` is verification's own. Its words ``x0, x1`` are the uniform
``u = (2 m + 1) / 2**53`` with ``m = x0 * 2**20 + x1 // 2**12``; ``x2 + 2**32 x3`` is the key of the
noise that draws from the residual, at the same position.

A draft stands if ``log u < log p(x) - log q(x)``. The residual needs no normaliser: its token is
the ``argmax`` of ``log max(0, p - q) + g``. Rounding can leave nothing of a residual as small as
itself; then the token is drawn from ``p``.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise.reference import gumbel_noise, philox
from lexshard.kernels.verify.types import (
    OPEN,
    REPLACED,
    STANDS,
    BoundedRow,
    DraftedRows,
    Finding,
    Limits,
    Proposals,
    ProposedGuess,
    Verdict,
)

# Of the Philox counter: the first that the plain noise leaves free.
ACCEPTANCE_LANE = 17
# Above what float64 loses in any of these sums and logarithms, here and in `kernels.verify`, and of
# large terms per unit.
GAP, GAP_PER_UNIT = 1e-9, 2.0**-48
# Beyond so many candidates every logit is as good.
MOST_CANDIDATES = 512
NOTHING = np.empty(0, np.int32)

Row = npt.NDArray[np.float64]  # [V]


def acceptance(key: int, position: int) -> tuple[float, int]:
    """The uniform that a draft is tested with, and the key of the noise of its residual."""
    counter = [np.full(1, word, np.uint64) for word in (position, 0, ACCEPTANCE_LANE, 0)]
    x0, x1, x2, x3 = (int(word[0]) for word in philox(tuple(counter), key))  # type: ignore[arg-type]
    return (2.0 * ((x0 << 20) | (x1 >> 12)) + 1.0) * 2.0**-53, x2 | (x3 << 32)


def log_softmax(logits: npt.NDArray[np.float32], scale: float) -> Row:
    """Log-probabilities at inverse temperature ``scale``; infinite logits share all the mass."""
    scaled = logits.astype(np.float64) * scale
    top = scaled.max()
    if top == -np.inf:
        return scaled
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf, where the answer is 0
        distance = np.where(scaled == top, 0.0, scaled - top)
    return distance - math.log(float(np.exp(distance).sum()))


def sigmoid_weights(logits: npt.NDArray[np.float32], scale: float, limits: Limits) -> Row:
    """``sigmoid((l scale - alpha) / (beta - alpha))``, 0 where a token is excluded."""
    alpha, beta = limits
    z = (logits.astype(np.float64) * scale - alpha) / (beta - alpha)
    with np.errstate(over="ignore"):  # exp(inf), where the weight is 0
        return np.asarray(1.0 / (1.0 + np.exp(-z)))


def draw_residual(p: Row, q: Row, key: int, position: int) -> int:
    """A token drawn from ``max(0, p - q)``, or from ``p`` where nothing is left."""
    left = np.maximum(0.0, p - q)
    weights = left if left.any() else p
    with np.errstate(divide="ignore"):
        scores: Row = np.log(weights)
    scores = scores + gumbel_noise(key, position, np.arange(len(p))).astype(np.float64)
    return int(np.argmax(scores)) if scores.max() > -np.inf else -1


def log_proposed(rows: DraftedRows, proposals: Proposals, row: int, size: int) -> Row:
    """The log-probabilities [V] that a draft was drawn with."""
    if proposals is not None:
        return log_softmax(proposals.logits[row], float(proposals.inverse_temperature[row]))
    result = np.full(size, -np.inf)
    result[rows.drafts[row]] = 0.0
    return result


def verify(
    logits: npt.NDArray[np.float32],
    rows: DraftedRows,
    proposals: Proposals,
    sigmoid: Limits | None,
) -> Verdict:
    count, size = logits.shape
    tokens = rows.drafts.copy()
    for row in range(count):
        scale, token = float(rows.inverse_temperature[row]), tokens[row]
        if sigmoid is None:
            log_p = log_softmax(logits[row], scale)
            log_q = log_proposed(rows, proposals, row, size)
            p, q = np.exp(log_p), np.exp(log_q)
        else:
            assert proposals is not None
            proposed_scale = float(proposals.inverse_temperature[row])
            p = sigmoid_weights(logits[row], scale, sigmoid)
            q = sigmoid_weights(proposals.logits[row], proposed_scale, sigmoid)
            with np.errstate(divide="ignore"):
                log_p, log_q = np.log(p), np.log(q)
        position = int(rows.position[row])
        uniform, residual_key = acceptance(int(rows.key[row]), position)
        with np.errstate(invalid="ignore"):  # -inf - -inf: the token cannot stand
            stands = math.log(uniform) < log_p[token] - log_q[token]
        if not stands:
            tokens[row] = draw_residual(p, q, residual_key, position)
    return Verdict(tokens, np.full(count, size if proposals is None else 2 * size))


def gap_of(*terms: float) -> float:
    return GAP + GAP_PER_UNIT * sum(abs(term) for term in terms if math.isfinite(term))


def try_guess(row: BoundedRow, guess: ProposedGuess) -> Finding:
    scale = row.inverse_temperature
    lower, upper = row.lower.astype(np.float64) * scale, row.upper.astype(np.float64) * scale
    if not -math.inf < upper.max() < math.inf:
        return Finding(OPEN, (-math.inf, math.inf), NOTHING)
    log_mass = (float(np.logaddexp.reduce(lower)), float(np.logaddexp.reduce(upper)))
    log_q = log_guessed(guess, len(upper))
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
    log_q = log_guessed(guess, len(row.upper))
    gap = gap_of(float(scores.max()), *finding.log_mass)
    least, most = residual_scores(scores, scores, log_q[finding.ids], finding.log_mass, gap)
    _, residual_key = acceptance(guess.key, guess.position)
    noise = gumbel_noise(residual_key, guess.position, finding.ids)
    best = int(np.argmax(least + noise))
    others = np.delete(most + noise, best)
    if least[best] == -np.inf or not others.max(initial=-np.inf) < least[best] + noise[best] - gap:
        return -1
    return int(finding.ids[best])


def log_guessed(guess: ProposedGuess, size: int) -> Row:
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
