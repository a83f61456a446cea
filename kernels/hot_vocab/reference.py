"""The mixture draw, stated plainly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential.double_precision import exponential_array
from lexshard.kernels.truncate.reference import MASS_UNIT, truncate


def mixture_draw(
    logits: npt.NDArray[np.float32],
    hot_ids: npt.NDArray[np.int32],
    uniforms: npt.NDArray[np.float64],
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
) -> npt.NDArray[np.int64]:
    keep = truncate(logits, inverse_temperature, top_k, top_p, log_min_p)
    if not keep.any():
        return np.full(len(uniforms), -1, np.int64)
    scaled = logits.astype(np.float64) * inverse_temperature
    with np.errstate(invalid="ignore"):  # inf - inf, where the answer is 0
        distance = np.where(scaled == scaled.max(), 0.0, scaled - scaled.max())
    masses = np.rint(exponential_array(distance) * MASS_UNIT).astype(np.int64)
    masses[~keep] = 0
    hot = np.zeros(len(logits), np.bool_)
    hot[hot_ids] = True
    alpha = float(masses[hot].sum()) / float(masses.sum())
    tokens = np.empty(len(uniforms), np.int64)
    for index, (accept, place) in enumerate(uniforms):
        side = np.flatnonzero(hot if accept < alpha else ~hot)
        sums = np.cumsum(masses[side])
        target = min(int(place * float(sums[-1])), int(sums[-1]) - 1)
        tokens[index] = side[np.searchsorted(sums, target, side="right")]
    return tokens
