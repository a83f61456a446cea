"""The search in numba: one pass for the maxima of blocks of 64 ids, then only blocks that matter.

What the first pass finds serves the second. Adjustments are applied to the bounds of blocks, and
token by token to no more than what such a bound cannot exclude.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

import lexshard.kernels.search.candidates as candidates
import lexshard.kernels.search.leaders as leaders
from lexshard.kernels.noise.cpu import noise_of
from lexshard.kernels.penalties.reference import Adjustments
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key
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


@njit(nogil=True, cache=True)
def find_thresholds(ids, logits, offsets, needs):  # type: ignore[no-untyped-def]
    rows = offsets.size - 1
    result = np.full(rows, -np.inf)
    for row in range(rows):
        start, stop = offsets[row], offsets[row + 1]
        kind = needs.kind[row]
        scale = needs.inverse_temperature[row]
        best = -np.inf
        if kind == TOP_K:
            if stop - start >= needs.k[row]:
                keys = np.empty(stop - start, np.int64)
                for index in range(start, stop):
                    keys[index - start] = order_key(logits[index])
                best = np.float64(key_value(kth_largest_key(keys, keys.size, needs.k[row])))
        else:
            for index in range(start, stop):
                score = np.float64(logits[index])
                if kind != GREEDY:
                    score = score * scale
                if kind == GUMBEL:
                    key, position = needs.key[row], needs.position[row]
                    score += np.float64(noise_of(key, position, ids[index]))
                best = max(best, score)
            if kind != GREEDY and kind != GUMBEL:
                best += needs.log_min_p[row]
        result[row] = best
    return result


def find_leaders(
    estimates: Estimates, vocabulary_size: int, needs: Needs, adjustments: Adjustments
) -> Leaders:
    return Leaders(
        *leaders.find_leaders(
            estimates.values,
            estimates.row_slack,
            estimates.token_ids,
            estimates.by_block,
            vocabulary_size,
            needs,
            adjustments,
        )
    )


def find_candidates(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
    best: Leaders,
) -> Found:
    arguments = (vocabulary_size, needs, adjustments, thresholds, best.maxima, best.noise)
    return Found(*candidates.find_candidates(*estimates, *arguments))


def narrow(
    estimates: Estimates,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
) -> Ragged:
    return candidates.narrow(*estimates, ids, offsets, needs, adjustments, thresholds)
