"""Scores of rows, stated plainly: one normaliser, one comparison, one sort per row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential import log_normalizer
from lexshard.kernels.logprobs.types import RowScores
from lexshard.kernels.truncate import best_ids


def score_rows(
    logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64], count: int
) -> RowScores:
    rows = len(logits)
    scores = RowScores(
        np.empty(rows),
        np.empty(rows, np.int64),
        np.empty((rows, count), np.int64),
        np.empty((rows, count)),
    )
    for row, token_id in enumerate(token_ids):
        own = logits[row]
        best = best_ids(own, count, implementation="reference")
        normalizer = log_normalizer(own, implementation="reference")
        with np.errstate(invalid="ignore"):  # inf - inf, which is not a number
            scores.logprob[row] = own[token_id].astype(np.float64) - normalizer
            scores.best_logprobs[row] = own[best].astype(np.float64) - normalizer
        scores.rank[row] = 1 + np.count_nonzero(own > own[token_id])
        scores.best_ids[row] = best
    return scores
