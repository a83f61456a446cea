"""The search, stated plainly: full rows of bounds, full rows of noise, a sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernels.noise.reference import gumbel_row
from kernels.penalties.reference import adjust
from kernels.search.kinds import GREEDY, GUMBEL, TOP_K

if TYPE_CHECKING:
    from kernels.penalties import Adjustments
    from kernels.search import Needs


def _bounds(
    estimate: npt.NDArray[np.float32],
    slack: float,
    size: int,
    adjustments: Adjustments,
    row: int,
    upper: bool,
) -> npt.NDArray[np.float64]:
    values = estimate[row, :size]
    shift = outward(slack, float(np.abs(values).max()))
    bounds = values + shift if upper else values - shift
    one_row = type(adjustments)(
        *(
            field[row : row + 2] if name.endswith("_offsets") else field
            for name, field in adjustments._asdict().items()
        )
    )
    one_row = one_row._replace(
        active=adjustments.active[row : row + 1],
        restricted=adjustments.restricted[row : row + 1],
        repetition=adjustments.repetition[row : row + 1],
        frequency=adjustments.frequency[row : row + 1],
        presence=adjustments.presence[row : row + 1],
    )
    adjusted = adjust(np.arange(size, dtype=np.int32), bounds, np.array([0, size]), one_row)
    return adjusted.astype(np.float64)


def outward(slack: float, magnitude: float) -> np.float32:
    """An fp32 shift that stays outside of ``slack`` when added to values up to ``magnitude``."""
    return np.float32(slack * (1.0 + 1e-6) + magnitude * 2.0**-23 + 2.0**-148)


def _scores(bounds: npt.NDArray[np.float64], needs: Needs, row: int) -> npt.NDArray[np.float64]:
    """The values that are compared with the threshold."""
    if needs.kind[row] in (GREEDY, TOP_K):
        return bounds
    scores = bounds * needs.inverse_temperature[row]
    if needs.kind[row] == GUMBEL:
        scores = scores + gumbel_row(int(needs.key[row]), int(needs.position[row]), len(bounds))
    return scores


def find_thresholds(
    estimate: npt.NDArray[np.float32],
    slack: npt.NDArray[np.float64],
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
) -> npt.NDArray[np.float64]:
    result = np.full(len(slack), np.nan)
    for row in range(len(slack)):
        if not np.isfinite(slack[row]):
            continue
        bounds = _bounds(estimate, slack[row], vocabulary_size, adjustments, row, upper=False)
        scores = np.sort(_scores(bounds, needs, row))[::-1]
        if needs.kind[row] == TOP_K:
            k = int(needs.k[row])
            result[row] = scores[k - 1] if k <= len(scores) else -np.inf
        elif needs.kind[row] in (GREEDY, GUMBEL):
            result[row] = scores[0]
        else:
            result[row] = scores[0] + needs.log_min_p[row]
    return result


def find_candidates(
    estimate: npt.NDArray[np.float32],
    slack: npt.NDArray[np.float64],
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    kept = []
    for row in range(len(slack)):
        if np.isnan(thresholds[row]):
            kept.append(np.arange(vocabulary_size))
            continue
        bounds = _bounds(estimate, slack[row], vocabulary_size, adjustments, row, upper=True)
        scores = _scores(bounds, needs, row)
        kept.append(np.flatnonzero((scores >= thresholds[row]) & (bounds > -np.inf)))
    offsets = np.cumsum([0, *(len(ids) for ids in kept)])
    return np.concatenate(kept).astype(np.int32), offsets.astype(np.int64)
