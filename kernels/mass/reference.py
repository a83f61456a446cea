"""Masses, stated plainly: full rows of bounds, sums of exponentials, sorts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.mass.types import OutsideMass
from kernels.penalties import Adjustments
from kernels.search import Estimates, Needs
from kernels.search.reference import adjusted_row, outward

# Above every rounding of a log-sum-exp of 2**20 terms.
MASS_MARGIN = 1e-9
# Plans look at tempered distances from the best estimate, in steps of 1/16 up to 48.
BIN_WIDTH = 1.0 / 16.0
BINS = 768
# The uncertainty of the total mass that a plan accepts, in masses of the last token of the nucleus.
CONFIDENCE = 0.5


def adjusted_bounds(
    estimates: Estimates, vocabulary_size: int, adjustments: Adjustments
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    every = np.arange(vocabulary_size, dtype=np.int32)
    values = estimates.values[0, :vocabulary_size]
    slack = outward(values, estimates.row_slack, estimates.hidden_slack[0])
    lower = adjusted_row(every, values - slack, adjustments, 0)
    return lower, adjusted_row(every, values + slack, adjustments, 0)


def outside_mass(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> OutsideMass:
    every = np.arange(vocabulary_size, dtype=np.int32)
    result = np.empty((3, len(estimates.values)))
    for row, wide in enumerate(estimates.values):
        values = wide[:vocabulary_size]
        slack = outward(values, estimates.row_slack, estimates.hidden_slack[row])
        outside = np.ones(vocabulary_size, np.bool_)
        outside[ids[offsets[row] : offsets[row + 1]]] = False
        upper = adjusted_row(every, values + slack, adjustments, row)[outside]
        lower = adjusted_row(every, values - slack, adjustments, row)[outside]
        scale = needs.inverse_temperature[row]
        result[0, row] = _log_sum(upper, scale) + MASS_MARGIN
        result[1, row] = _log_sum(lower, scale) - MASS_MARGIN
        result[2, row] = upper.max(initial=-np.inf)
    return OutsideMass(*result)


def _log_sum(values: npt.NDArray[np.float32], scale: float) -> float:
    scaled = values.astype(np.float64) * scale
    return float(np.logaddexp.reduce(scaled)) if len(scaled) else -np.inf


def plan(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    top_p: npt.NDArray[np.float64],
    epsilon: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    every = np.arange(vocabulary_size, dtype=np.int32)
    result = np.empty(len(estimates.values), np.int64)
    for row, wide in enumerate(estimates.values):
        values = wide[:vocabulary_size]
        zero = np.zeros_like(values)
        slack = outward(zero, estimates.row_slack, estimates.hidden_slack[row])
        adjusted = adjusted_row(every, values, adjustments, row)
        scale = needs.inverse_temperature[row]
        order = np.argsort(-adjusted, kind="stable")
        order = order[adjusted[order] > -np.inf]
        distance = (adjusted[order[0]] - adjusted[order]).astype(np.float64) * scale
        place = (distance / BIN_WIDTH).astype(np.int64)
        order, place = order[place < BINS], place[place < BINS]
        weights = np.exp(-(place + 0.5) * BIN_WIDTH)
        uncertain = np.cumsum((weights * slack[order] * scale)[::-1])[::-1]
        left = np.cumsum(weights[::-1])[::-1]
        # What is left and how uncertain it is beyond the last token of each bin.
        ends = np.flatnonzero(np.append(np.diff(place) > 0, True))
        after = np.append(left, 0.0)[ends + 1]
        unsure = np.append(uncertain, 0.0)[ends + 1]
        if epsilon[row] > 0.0:
            good = after + unsure < 0.9 * epsilon[row] * left[0]
        else:
            edge = place[ends[np.argmax(left[0] - after >= top_p[row] * left[0])]]
            widest = float(slack[order].max()) * scale / BIN_WIDTH
            room = CONFIDENCE * np.exp(-(edge + 0.5) * BIN_WIDTH)
            good = (place[ends] > edge + 2.0 * widest + 1.0) & (2.0 * unsure < room)
        result[row] = ends[np.argmax(good)] + 1 if good.any() else len(order)
    return result
