"""Log-probabilities of whole rows: of a token, its rank, and of the best tokens, in one pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.logprobs import cpu
from lexshard.kernels.logprobs.reference import RowScores

__all__ = ["RowScores", "score_rows"]


def score_rows(
    logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64], count: int
) -> RowScores:
    """Scores of token ``token_ids`` [N] and of the ``count`` best tokens of every row of
    ``logits`` [N, V] fp32 without NaN.

    A log-probability is ``f64(l) - log_normalizer`` (see `kernels.logprobs.reference`); the best
    are those of `kernels.truncate.best_ids`, at most V. Raises `ValueError` on shapes or types that
    do not fit.
    """
    if logits.ndim != 2 or logits.shape[1] < 1 or len(token_ids) != len(logits) or count < 0:
        raise ValueError(
            f"logits [N, V], token ids [N] and a count from 0 expected, got {logits.shape}, "
            f"{token_ids.shape} and {count}"
        )
    if logits.dtype != np.float32:
        raise ValueError("fp32 expected: convert before scoring rows")
    size = logits.shape[1]
    maxima = np.empty(blocks_of(size), np.float32)
    found = cpu.score_rows(np.ascontiguousarray(logits), token_ids, min(count, size), maxima)
    return RowScores(*found)
