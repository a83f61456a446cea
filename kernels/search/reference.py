"""The search, stated plainly: full rows of bounds, full rows of noise, sorts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise.reference import gumbel_row
from lexshard.kernels.penalties import Adjustments, select_row
from lexshard.kernels.penalties.reference import adjust
from lexshard.kernels.rounding import INFLATION, SMALLEST_SLACK, SMALLEST_STEP, ULP_SHARE
from lexshard.kernels.search.types import (
    GREEDY,
    GUMBEL,
    TOP_K,
    Estimates,
    Found,
    Leaders,
    Needs,
    Ragged,
)


def outward(
    values: npt.NDArray[np.float32],
    row_slack: npt.NDArray[np.float32],
    hidden_slack: npt.NDArray[np.float64],
) -> npt.NDArray[np.float32]:
    """fp32 slacks that stay outside of the bound when added to or taken from ``values``.

    The inflation covers the seven roundings of the sum below, the share of ``values`` that of the
    final addition, the smallest slack every underflow.
    """
    error, size, rest = (hidden_slack * INFLATION + SMALLEST_STEP).astype(np.float32)
    rest = np.float32(rest + SMALLEST_SLACK)
    return error * row_slack[0] + size * row_slack[1] + rest + np.abs(values) * ULP_SHARE


def adjusted_row(
    ids: npt.NDArray[np.int32],
    values: npt.NDArray[np.float32],
    adjustments: Adjustments,
    row: int,
) -> npt.NDArray[np.float32]:
    """The adjustments of one row, applied to ``values`` of sorted ``ids``."""
    one_row = select_row(adjustments, row)
    return adjust(ids, values, np.array([0, len(ids)]), one_row)


def compared_values(
    logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int32], needs: Needs, row: int
) -> npt.NDArray[np.float64]:
    """The values that are compared with the threshold; ``ids`` are tokens of the vocabulary."""
    wide = logits.astype(np.float64)
    if needs.kind[row] in (GREEDY, TOP_K):
        return wide
    scores = wide * needs.inverse_temperature[row]
    if needs.kind[row] == GUMBEL and len(ids):
        noise = gumbel_row(int(needs.key[row]), int(needs.position[row]), int(ids[-1]) + 1)
        scores = scores + noise[ids]
    return scores


def tokens_of(estimates: Estimates, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Which tokens of the vocabulary ``rows`` are."""
    return estimates.token_ids[rows] if len(estimates.token_ids) else rows


def find_leaders(
    estimates: Estimates, vocabulary_size: int, needs: Needs, adjustments: Adjustments
) -> Leaders:
    every = np.arange(vocabulary_size, dtype=np.int32)
    tokens = tokens_of(estimates, every)
    leaders = []
    for row, values in enumerate(estimates.values):
        adjusted = adjusted_row(every, values[:vocabulary_size], adjustments, row)
        scores = compared_values(adjusted, tokens, needs, row)
        count = int(needs.k[row]) if needs.kind[row] == TOP_K else 1
        best = np.argsort(-scores, kind="stable")[:count]
        leaders.append(np.sort(best[scores[best] > -np.inf]))
    nothing = np.empty((len(leaders), 0))
    return Leaders(*_ragged(leaders), nothing.astype(np.float32), nothing)


def find_thresholds(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
) -> npt.NDArray[np.float64]:
    result = np.full(len(offsets) - 1, -np.inf)
    for row in range(len(result)):
        own = slice(offsets[row], offsets[row + 1])
        scores = np.sort(compared_values(logits[own], ids[own], needs, row))[::-1]
        wanted = int(needs.k[row]) if needs.kind[row] == TOP_K else 1
        if len(scores) >= wanted:
            result[row] = scores[wanted - 1]
            if needs.kind[row] not in (GREEDY, GUMBEL, TOP_K):
                result[row] += needs.log_min_p[row]
    return result


def find_candidates(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
    best: Leaders,
) -> Found:
    every = np.arange(vocabulary_size, dtype=np.int32)
    tokens = tokens_of(estimates, every)
    kept = []
    largest = np.empty(len(estimates.values))
    for row, wide in enumerate(estimates.values):
        values = wide[:vocabulary_size]
        slack = outward(values, estimates.row_slack, estimates.hidden_slack[row])
        upper = adjusted_row(every, values + slack, adjustments, row)
        scores = compared_values(upper, tokens, needs, row)
        kept.append(np.flatnonzero((scores >= thresholds[row]) & (upper > -np.inf)))
        largest[row] = upper.max()
    return Found(*_ragged(kept), largest)


def narrow(
    estimates: Estimates,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
) -> Ragged:
    kept = []
    for row in range(len(offsets) - 1):
        own = slice(offsets[row], offsets[row + 1])
        values, mine = estimates.values[own], ids[own]
        slack = outward(values, estimates.row_slack[:, mine], estimates.hidden_slack[row])
        upper = adjusted_row(mine, values + slack, adjustments, row)
        scores = compared_values(upper, tokens_of(estimates, mine), needs, row)
        kept.append(mine[(scores >= thresholds[row]) & (upper > -np.inf)])
    return _ragged(kept)


def _ragged(rows: list[npt.NDArray[np.int64]] | list[npt.NDArray[np.int32]]) -> Ragged:
    offsets = np.cumsum([0, *(len(ids) for ids in rows)])
    return np.concatenate(rows).astype(np.int32), offsets.astype(np.int64)
