"""Which tokens can still matter, from approximate logits with an error bound. Never a sort.

Three steps; between the first two the caller computes canonical logits of the leaders, and shards
can share thresholds before the last:

1. `find_leaders`: per row the few tokens whose estimates are best.
2. `find_thresholds`: from the leaders' canonical logits a value ``tau`` that the row's answer
   certainly reaches.
3. `find_candidates`: every token whose upper bound reaches ``tau``; nothing else can matter.
   `narrow` does the same for a list of tokens with better estimates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import lexshard.kernels.search.candidates as candidates
import lexshard.kernels.search.leaders as leaders
from lexshard.kernels import pool
from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search.thresholds import find_thresholds_of
from lexshard.kernels.search.types import (
    GREEDY,
    GUMBEL,
    MIN_P,
    TOP_K,
    Estimates,
    Found,
    Leaders,
    Needs,
    Ragged,
)

__all__ = [
    "GREEDY",
    "GUMBEL",
    "MIN_P",
    "TOP_K",
    "Estimates",
    "Found",
    "Leaders",
    "Needs",
    "block_slack",
    "find_candidates",
    "find_leaders",
    "find_thresholds",
    "narrow",
]


# These calls are short beside what their callers do.
ALONE = pool.team(worth=False)


def block_slack(row_slack: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The largest of every 64 entries of ``row_slack`` [2, V]: [2, V / 64], rounded up."""
    return np.maximum.reduceat(row_slack, np.arange(0, row_slack.shape[1], BLOCK), axis=1)


def find_leaders(
    estimates: Estimates, vocabulary_size: int, needs: Needs, adjustments: Adjustments
) -> Leaders:
    """The ids of the best adjusted estimates.

    Exactly ``k`` for TOP_K and one otherwise (of ``estimate s + noise`` for GUMBEL), fewer where
    fewer tokens are not excluded. Which of equal estimates is taken is not defined.

    Raises:
        ValueError: a TOP_K row wants no token, for which compiled code has no room.
    """
    if np.any((needs.kind == TOP_K) & (needs.k < 1)):
        raise ValueError("a row of the k best wants k of at least 1: leave it out of the search")
    values, numbers = estimates.values, (estimates.token_ids, estimates.by_block)
    rows = (*numbers, vocabulary_size, needs, adjustments)
    maxima = np.empty((len(values), blocks_of(vocabulary_size)), np.float32)
    noise = np.empty(maxima.shape)
    leaders.outline_blocks(values, *rows, 0, maxima.shape[1], maxima, noise)
    arguments = (values, estimates.row_slack, *rows, maxima, noise)
    ids, offsets = leaders.find_leaders(*ALONE, *arguments)
    return Leaders(ids, offsets, maxima, noise)


def find_thresholds(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
) -> npt.NDArray[np.float64]:
    """Per row a lower bound ``tau`` [N] of the value that decides.

    ``logits`` [total] are the leaders' canonical logits after adjustment. ``tau`` is the largest
    ``l``, ``l s + g`` or ``l s + ln min_p`` of GREEDY, GUMBEL and MIN_P rows, the k-th largest
    ``l`` of TOP_K rows, and ``-inf`` where there are too few leaders. The maximum of the
    thresholds of several shards is a threshold of their union.
    """
    return find_thresholds_of(ids, logits, offsets, needs)


def find_candidates(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
    best: Leaders,
) -> Found:
    """The ids whose upper bound reaches the row's threshold.

    ``best`` are the leaders of the same estimates, needs and adjustments. Bounds are rounded
    outward and adjusted. Excluded ids (adjusted to ``-inf``) are never candidates; equality keeps a
    candidate, since ties go to the lower id.
    """
    arguments = (vocabulary_size, needs, adjustments, thresholds, best.maxima, best.noise)
    return Found(*candidates.find_candidates(*ALONE, *estimates, *arguments))


def narrow(
    estimates: Estimates,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
) -> Ragged:
    """Those of ``ids`` [total] that `find_candidates` would keep; ``estimates.values`` [total]."""
    return candidates.narrow(*estimates, ids, offsets, needs, adjustments, thresholds)
