"""Verification with sigmoids, stated plainly in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.verify.reference import Row, acceptance, draw, draw_residual
from lexshard.kernels.verify.types import DenseProposals, DraftedRows, Verdict


def sigmoid_weights(
    logits: npt.NDArray[np.float32], scale: float, alpha: float, beta: float
) -> Row:
    """``sigmoid((l s - alpha) / (beta - alpha))``, 0 where a token is excluded."""
    z = (logits.astype(np.float64) * scale - alpha) / (beta - alpha)
    with np.errstate(over="ignore"):  # exp(inf), where the weight is 0
        return np.asarray(1.0 / (1.0 + np.exp(-z)))


def verify_by_sigmoid(
    logits: Any, rows: DraftedRows, proposals: DenseProposals, alpha: float, beta: float
) -> Verdict:
    sequences = len(rows.offsets) - 1
    tokens = np.full(len(logits), -1, np.int64)
    accepted = np.zeros(sequences, np.int64)
    nothing = np.zeros(logits.shape[1])
    for sequence in range(sequences):
        first, stop = int(rows.offsets[sequence]), int(rows.offsets[sequence + 1])
        scale, key = float(rows.inverse_temperature[sequence]), int(rows.key[sequence])
        proposed_scale = float(proposals.inverse_temperature[sequence])
        for row in range(first, stop):
            position = int(rows.position[sequence]) + row - first
            tested, draft = row < stop - rows.bonus, row - sequence * rows.bonus
            if scale == 0:
                tokens[row] = draw(logits[row], 0.0, key, position)
                stands = tested and tokens[row] == rows.drafts[draft]
            elif tested:
                tokens[row] = token = int(rows.drafts[draft])
                p = sigmoid_weights(logits[row], scale, alpha, beta)
                q = sigmoid_weights(proposals.logits[draft], proposed_scale, alpha, beta)
                uniform, residual_key = acceptance(key, position)
                with np.errstate(divide="ignore", invalid="ignore"):
                    stands = math.log(uniform) < np.log(p[token]) - np.log(q[token])
                if not stands:
                    tokens[row] = draw_residual(p, q, residual_key, position)
            else:
                p = sigmoid_weights(logits[row], scale, alpha, beta)
                tokens[row] = draw_residual(p, nothing, key, position)
                stands = False
            if not stands:
                break
            accepted[sequence] += 1
    return Verdict(accepted, tokens)
