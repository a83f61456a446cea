"""The decision, stated plainly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise.reference import gumbel_noise
from lexshard.kernels.truncate.reference import truncate


class Controls(NamedTuple):
    """How N rows are sampled, as flat arrays."""

    inverse_temperature: npt.NDArray[np.float64]  # [N] fp32 values; 0 is greedy
    top_k: npt.NDArray[np.int64]  # [N] 0 is off
    top_p: npt.NDArray[np.float64]  # [N] 1 is off
    log_min_p: npt.NDArray[np.float64]  # [N] -inf is off
    key: npt.NDArray[np.uint64]  # [N]
    position: npt.NDArray[np.uint64]  # [N]


def draw(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    controls: Controls,
) -> npt.NDArray[np.int64]:
    tokens = np.full(len(offsets) - 1, -1, np.int64)
    for row in range(len(tokens)):
        own = slice(offsets[row], offsets[row + 1])
        row_ids, row_logits = ids[own], logits[own]
        scale = float(controls.inverse_temperature[row])
        if scale == 0:
            keep = row_logits > -np.inf
            scores = row_logits.astype(np.float64)
        else:
            keep = truncate(
                row_logits,
                scale,
                int(controls.top_k[row]),
                float(controls.top_p[row]),
                float(controls.log_min_p[row]),
            )
            noise = gumbel_noise(int(controls.key[row]), int(controls.position[row]), row_ids)
            scores = row_logits.astype(np.float64) * scale + noise.astype(np.float64)
        if keep.any():
            tokens[row] = row_ids[keep][np.argmax(scores[keep])]
    return tokens
