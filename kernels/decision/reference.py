"""The decision, stated plainly: every token adjusted, sorted, weighed and given its noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.draw.reference import Controls, draw
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.penalties.reference import adjust


class Decided(NamedTuple):
    """What deciding dense rows found."""

    tokens: npt.NDArray[np.int64]  # [B], -1 where every token is excluded
    visited: npt.NDArray[np.int64]  # [B] tokens outside the hot set whose logit was read


def block_maxima(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.maximum.reduceat(logits, np.arange(0, logits.shape[1], BLOCK), axis=1)


def decide_candidates(
    ids: npt.NDArray[np.int32],
    raw: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    controls: Controls,
    adjustments: Adjustments,
) -> npt.NDArray[np.int64]:
    return draw(ids, adjust(ids, raw, offsets, adjustments), offsets, controls)


def decide_dense(
    logits: npt.NDArray[np.float32],
    maxima: npt.NDArray[np.float32],
    controls: Controls,
    adjustments: Adjustments,
    hot_ids: npt.NDArray[np.int32] | None = None,
) -> Decided:
    """Reads everything: ``maxima`` and ``hot_ids`` do not matter."""
    rows, size = logits.shape
    ids = np.tile(np.arange(size, dtype=np.int32), rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * size
    tokens = decide_candidates(ids, logits.ravel(), offsets, controls, adjustments)
    hot = 0 if hot_ids is None else len(hot_ids)
    return Decided(tokens, np.full(rows, size - hot, np.int64))
