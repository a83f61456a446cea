"""The decision itself: truncate each row's candidates and draw its token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.draw import cpu
from lexshard.kernels.draw.reference import Controls

__all__ = ["Controls", "draw"]


def draw(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    controls: Controls,
) -> npt.NDArray[np.int64]:
    """The token id drawn in each row [N], or -1 where every token is excluded.

    Ragged candidates: row ``r`` owns ``offsets[r]:offsets[r + 1]`` of ``ids`` (sorted within a
    row) and ``logits`` (adjusted, fp32). Greedy rows take the largest logit. Others take, over the
    tokens that `kernels.truncate` keeps, the largest ``f64(l) * f64(inverse_temperature) +
    f64(g)`` with the noise ``g`` of `kernels.noise`. Ties go to the lower id.
    """
    return cpu.draw(ids, logits, offsets, controls)
