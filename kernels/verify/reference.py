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
from lexshard.kernels.verify.types import DraftedRows, Limits, Proposals, Verdict

# Of the Philox counter: the first that the plain noise leaves free.
ACCEPTANCE_LANE = 17

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
