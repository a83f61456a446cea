"""One decision whole: adjust, truncate, draw, from raw canonical logits to a token, in one call.

Two inputs, the same tokens: the few candidates that a certified search left, or every logit of the
vocabulary, of which only blocks of 64 that can still matter are read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.decision import cpu, maxima
from lexshard.kernels.decision.packed import PackedRows, decide_packed, pack
from lexshard.kernels.decision.reference import Decided
from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import Adjustments

__all__ = [
    "Decided",
    "PackedRows",
    "block_maxima",
    "decide_candidates",
    "decide_dense",
    "decide_packed",
    "pack",
]

NO_IDS = np.empty(0, np.int32)


def block_maxima(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The largest of every 64 logits of each row: [B, V] fp32 without NaN to [B, ceil(V / 64)].
    Raises `ValueError` for another type."""
    return maxima.block_maxima(_in_rows(logits))


def decide_candidates(
    ids: npt.NDArray[np.int32],
    raw: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    controls: Controls,
    adjustments: Adjustments,
) -> npt.NDArray[np.int64]:
    """The token id drawn in each row [N], or -1 where every token is excluded.

    Ragged candidates: row ``r`` owns ``offsets[r]:offsets[r + 1]`` of ``ids`` [total] (sorted
    within a row) and ``raw`` [total], canonical logits before any processor. Adjusted as
    `kernels.penalties.adjust` does, then decided as `kernels.draw.draw` does.
    """
    return cpu.decide_candidates(ids, raw, offsets, controls, adjustments)


def decide_dense(
    logits: npt.NDArray[np.float32],
    best: npt.NDArray[np.float32],
    controls: Controls,
    adjustments: Adjustments,
    hot_ids: npt.NDArray[np.int32] | None = None,
) -> Decided:
    """The token each row's logits give: those of `decide_candidates` with every token.

    ``logits`` [B, V] fp32 are raw canonical logits, ``best`` [B, ceil(V / 64)] their
    `block_maxima`. Neither is written, nor copied where it is C-contiguous; no row is sorted, and
    a history of any length costs the same.

    ``hot_ids`` [H] (sorted, distinct, below V) are visited first where top-k is on, so that what
    they reach leaves fewer other tokens to visit; elsewhere blocks come in the order of their
    bounds, on which hot ids do not improve. Tokens never depend on them. Raises `ValueError` where
    shapes, types or hot ids are not as said, or a maximum is NaN.
    """
    rows, size = logits.shape
    if best.shape != (rows, blocks_of(size)):
        raise ValueError(
            f"logits {logits.shape} have block maxima of shape {(rows, blocks_of(size))}, "
            f"got {best.shape}"
        )
    hot = NO_IDS if hot_ids is None else hot_ids
    found = cpu.decide_dense(_in_rows(logits), _in_rows(best), controls, adjustments, hot)
    return Decided(*found)


def _in_rows(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if matrix.dtype != np.float32:
        raise ValueError(f"logits and their maxima are fp32, got {matrix.dtype}")
    return np.ascontiguousarray(matrix)
