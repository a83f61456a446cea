"""Verification, stated plainly in float64.

Two streams of `kernels.noise` decide, and no random number has two uses:

- Bonus tokens and all of `coupled` are drawn with the plain noise of (key, position, token id), so
  a row without a draft draws what plain decoding draws. A drafter may use this noise, too.
- Whether a draft stands, and what replaces it, must not depend on the noise that drew the draft.
  The plain noise has the Philox counters ``(position, block, lane, 0)`` with lanes 0 to 16;
  ``(position, 0, 17, 0)`` is the row's own. Its words ``x0, x1`` are the uniform
  ``u = (2 m + 1) / 2**53`` with ``m = x0 * 2**20 + x1 // 2**12``; ``x2 + 2**32 x3`` is the key of
  the noise that draws from the residual, at the same position.

A draft stands if ``log u < log p(x) - log q(x)``. The residual needs no normaliser: its token is
the ``argmax`` of ``log max(0, p - q) + g``. Rounding can leave nothing of a residual as small as
itself; then the token is drawn from ``p``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise.reference import gumbel_noise, philox
from lexshard.kernels.verify.types import DenseProposals, DraftedRows, Proposals, Verdict

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


def best(scores: Row) -> int:
    """The token of the largest score, -1 where there is none."""
    return int(np.argmax(scores)) if scores.max() > -np.inf else -1


def draw(logits: npt.NDArray[np.float32], scale: float, key: int, position: int) -> int:
    """As `kernels.draw` does, over every token."""
    scores: Row = logits.astype(np.float64)
    if scale > 0:
        noise = gumbel_noise(key, position, np.arange(len(logits)))
        scores = scores * scale + noise.astype(np.float64)
    return best(scores)


def draw_residual(p: Row, q: Row, key: int, position: int) -> int:
    """A token drawn from ``max(0, p - q)``, or from ``p`` where nothing is left."""
    left = np.maximum(0.0, p - q)
    weights = left if left.any() else p
    with np.errstate(divide="ignore"):
        scores: Row = np.log(weights)
    scores = scores + gumbel_noise(key, position, np.arange(len(p))).astype(np.float64)
    return best(scores)


def proposal(rows: DraftedRows, proposals: Proposals, sequence: int, draft: int, size: int) -> Row:
    """The log-probabilities [V] that a draft was drawn with."""
    if isinstance(proposals, DenseProposals):
        return log_softmax(
            np.asarray(proposals.logits[draft]), float(proposals.inverse_temperature[sequence])
        )
    probabilities = np.zeros(size)
    if proposals is None:
        probabilities[rows.drafts[draft]] = 1.0
    else:
        own = slice(proposals.offsets[draft], proposals.offsets[draft + 1])
        probabilities[proposals.ids[own]] = proposals.probabilities[own]
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


def verify(logits: Any, rows: DraftedRows, mode: str, proposals: Proposals) -> Verdict:
    sequences = len(rows.offsets) - 1
    tokens = np.full(len(logits), -1, np.int64)
    accepted = np.zeros(sequences, np.int64)
    for sequence in range(sequences):
        first, stop = int(rows.offsets[sequence]), int(rows.offsets[sequence + 1])
        scale = 0.0 if mode == "greedy" else float(rows.inverse_temperature[sequence])
        key = int(rows.key[sequence])
        for row in range(first, stop):
            position = int(rows.position[sequence]) + row - first
            draft = row - sequence * rows.bonus
            if row == stop - rows.bonus:
                tokens[row] = draw(logits[row], scale, key, position)
            elif mode == "exact" and scale > 0:
                token = int(rows.drafts[draft])
                log_p = log_softmax(logits[row], scale)
                log_q = proposal(rows, proposals, sequence, draft, logits.shape[1])
                uniform, residual_key = acceptance(key, position)
                with np.errstate(invalid="ignore"):  # -inf - -inf: the token cannot stand
                    stands = math.log(uniform) < log_p[token] - log_q[token]
                if not stands:
                    token = draw_residual(np.exp(log_p), np.exp(log_q), residual_key, position)
                tokens[row] = token
                if not stands:
                    break
            else:
                tokens[row] = draw(logits[row], scale, key, position)
                if tokens[row] != rows.drafts[draft]:
                    break
            accepted[sequence] += row < stop - rows.bonus
    return Verdict(accepted, tokens)
