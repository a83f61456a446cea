"""Scores of rows, stated plainly: one normaliser, one comparison, one sort per row."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential.double_precision import exponential_array
from lexshard.kernels.truncate.reference import best_ids


class RowScores(NamedTuple):
    """Log-probabilities of N rows: of one token each, and of the k best."""

    logprob: npt.NDArray[np.float64]  # [N] of the row's token
    rank: npt.NDArray[np.int64]  # [N] of the row's token, from 1; equal logits share the best
    best_ids: npt.NDArray[np.int64]  # [N, k] largest logit first, ties to the lower id
    best_logprobs: npt.NDArray[np.float64]  # [N, k]


def log_normalizer(logits: npt.NDArray[np.float32]) -> float:
    """``log(sum(exp(logits)))`` of fp32 logits [n], exponentials added one after the other."""
    largest = float(logits.max())
    if math.isinf(largest):
        return largest
    weights = exponential_array(logits.astype(np.float64) - largest)
    return largest + math.log(float(np.add.accumulate(weights)[-1]))


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
        best = best_ids(own, count)
        normalizer = log_normalizer(own)
        with np.errstate(invalid="ignore"):  # inf - inf, which is not a number
            scores.logprob[row] = own[token_id].astype(np.float64) - normalizer
            scores.best_logprobs[row] = own[best].astype(np.float64) - normalizer
        scores.rank[row] = 1 + np.count_nonzero(own > own[token_id])
        scores.best_ids[row] = best
    return scores
