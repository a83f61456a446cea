"""Which tokens can still matter, from approximate logits with an error bound. Never a sort.

Two steps, so that shards can share thresholds in between:

1. `find_thresholds`: per row a value ``tau`` that the row's answer certainly reaches.
2. `find_candidates`: every token whose upper bound reaches ``tau``; nothing else can matter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.penalties import Adjustments
from kernels.search import cpu, reference
from kernels.search.kinds import GREEDY, GUMBEL, MIN_P, TOP_K

Implementation = Literal["reference", "cpu"]

__all__ = [
    "GREEDY",
    "GUMBEL",
    "MIN_P",
    "TOP_K",
    "Needs",
    "find_candidates",
    "find_thresholds",
]


class Needs(NamedTuple):
    """What N rows ask of the search, as flat arrays (see `find_thresholds`)."""

    kind: npt.NDArray[np.int64]  # [N] GREEDY, GUMBEL, TOP_K or MIN_P
    k: npt.NDArray[np.int64]  # [N]
    log_min_p: npt.NDArray[np.float64]  # [N]
    key: npt.NDArray[np.uint64]  # [N]
    position: npt.NDArray[np.uint64]  # [N]
    inverse_temperature: npt.NDArray[np.float64]  # [N], fp32 values, above 0 unless GREEDY


def find_thresholds(
    estimate: npt.NDArray[np.float32],
    slack: npt.NDArray[np.float64],
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    *,
    implementation: Implementation | None = None,
) -> npt.NDArray[np.float64]:
    """Per row a lower bound ``tau`` [N] of the value that decides, float64.

    ``estimate`` [N, W] with ``W >= vocabulary_size`` (columns beyond are ignored) is within
    ``slack`` [N] of the raw canonical logits ``c``, and finite wherever the slack is finite. With
    ``lower_i = adjusted(estimate_i - slack)``, rounded down, ``s`` the inverse temperature and
    ``g_i`` the noise:

    - GREEDY: ``max lower_i``
    - GUMBEL: ``max lower_i s + g_i``
    - TOP_K: the k-th largest ``lower_i`` (``-inf`` where fewer than k are finite)
    - MIN_P: ``s max lower_i + ln min_p``

    The maximum of the thresholds of several shards is a threshold of their union. Where the slack
    is not finite the result is NaN.
    """
    module = reference if implementation == "reference" else cpu
    return module.find_thresholds(estimate, slack, vocabulary_size, needs, adjustments)


def find_candidates(
    estimate: npt.NDArray[np.float32],
    slack: npt.NDArray[np.float64],
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    thresholds: npt.NDArray[np.float64],
    *,
    implementation: Implementation | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The ids (sorted within a row) whose upper bound reaches the row's threshold, and offsets.

    Arguments as for `find_thresholds`. Excluded ids (adjusted to ``-inf``) are never candidates;
    equality keeps a candidate, since ties go to the lower id. A NaN threshold keeps every id of
    the vocabulary.
    """
    module = reference if implementation == "reference" else cpu
    return module.find_candidates(estimate, slack, vocabulary_size, needs, adjustments, thresholds)
