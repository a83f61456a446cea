"""What is told of a row's logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class RowScores(NamedTuple):
    """Log-probabilities of N rows: of one token each, and of the k best."""

    logprob: npt.NDArray[np.float64]  # [N] of the row's token
    rank: npt.NDArray[np.int64]  # [N] of the row's token, from 1; equal logits share the best
    best_ids: npt.NDArray[np.int64]  # [N, k] largest logit first, ties to the lower id
    best_logprobs: npt.NDArray[np.float64]  # [N, k]
