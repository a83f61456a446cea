"""CSV-Decode's online algorithm: open whole clusters, best bound first, until a certificate holds.

Algorithm 1 of the paper on canonical logits, for one row. Bounds stand in a max-heap; an opened
cluster's canonical products are computed and what they say about the certificate is updated. An
opening can be continued: with a larger budget, or after its caller examined what is known.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.opening import cpu, reference
from lexshard.kernels.opening.kinds import (
    CERTIFIED,
    EPSILON,
    EXAMINE,
    GREEDY,
    GUMBEL,
    MIN_P,
    NUCLEUS,
    SPENT,
    TOP_K,
)
from lexshard.kernels.opening.types import Goal, Head, Opening
from lexshard.kernels.penalties import Adjustments

Implementation = Literal["reference", "cpu"]

__all__ = [
    "CERTIFIED",
    "EPSILON",
    "EXAMINE",
    "GREEDY",
    "GUMBEL",
    "MIN_P",
    "NUCLEUS",
    "SPENT",
    "TOP_K",
    "Goal",
    "Head",
    "Opening",
    "advance",
    "begin",
    "outside_log_mass",
]


def begin(
    head: Head,
    hidden: npt.NDArray[np.float32],
    upper: npt.NDArray[np.float32],
    goal: Goal,
    adjustments: Adjustments,
    first_ids: npt.NDArray[np.int32],
    noise: npt.NDArray[np.float32] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Opening:
    """The opening of one row with ``first_ids`` (sorted, distinct) known and no cluster opened.

    ``hidden`` [d] fp32. ``upper`` [C] fp32 bounds, per cluster, the adjusted logit of every row
    that is not in ``first_ids``; ``-inf`` where there is none that could be drawn. ``adjustments``
    are those of this row alone. ``noise`` [V] is needed for GUMBEL.
    """
    sizes = np.diff(head.offsets)
    scaled = upper.astype(np.float64)
    log_masses = np.empty(0)
    if goal.kind in (EPSILON, NUCLEUS):
        with np.errstate(divide="ignore"):
            log_masses = np.log(sizes) + scaled * goal.inverse_temperature
    if goal.kind == GUMBEL:
        if noise is None:
            raise ValueError("a draw needs the noise of every token")
        scaled = scaled * goal.inverse_temperature + _largest_noise(head, noise)
    size = len(head.order)
    opening = Opening(
        products=np.empty(size, np.float32),
        known=np.zeros(size, np.bool_),
        heap_scores=np.empty(len(sizes)),
        heap_clusters=np.empty(len(sizes), np.int32),
        log_masses=log_masses,
        noise=np.empty(0, np.float32) if noise is None else noise,
        best=np.full(goal.k if goal.kind == TOP_K else 1, -np.inf, np.float32),
        counts=np.zeros(3, np.int64),
        numbers=np.array([-math.inf, -math.inf, 0.0, math.inf, 0.0, 0.0, math.inf]),
    )
    # An infinite bound of a cluster without rows is no bound of anything.
    scores = np.where((sizes > 0) & (upper > -np.inf), scaled, -np.inf)
    module = reference if implementation == "reference" else cpu
    module.begin(head, padded(hidden), scores, goal, adjustments, first_ids, opening)
    return opening


def advance(
    head: Head,
    hidden: npt.NDArray[np.float32],
    goal: Goal,
    adjustments: Adjustments,
    opening: Opening,
    *,
    row_limit: int,
    cluster_limit: int,
    implementation: Implementation | None = None,
) -> int:
    """Opens clusters until the goal is reached (`CERTIFIED`; also where nothing is left), the next
    one would exceed a limit (`SPENT`), or the caller must look (`EXAMINE`, NUCLEUS only).

    ``row_limit`` limits known rows, ``cluster_limit`` opened clusters, since `begin`. Arguments
    else as for `begin`.
    """
    module = reference if implementation == "reference" else cpu
    return int(
        module.advance(head, padded(hidden), goal, adjustments, opening, row_limit, cluster_limit)
    )


def outside_log_mass(
    opening: Opening, *, implementation: Implementation | None = None
) -> tuple[float, float]:
    """``log sum |c| exp(U s)`` over what is not opened, rounded up, and the largest ``U`` there;
    for EPSILON and NUCLEUS. Both ``-inf`` where nothing is left."""
    module = reference if implementation == "reference" else cpu
    count = int(opening.counts[0])
    largest = float(opening.heap_scores[0]) if count else -math.inf
    return float(module.outside_mass(opening)), largest


def padded(hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """One hidden state as the canonical row kernel reads it: [1, d rounded up to 16] float64."""
    row = np.zeros((1, len(hidden) + -len(hidden) % 16))
    row[0, : len(hidden)] = hidden
    return row


def _largest_noise(head: Head, noise: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """[C]; anything for empty clusters."""
    sizes = np.diff(head.offsets)
    result = np.zeros(len(sizes))
    some = sizes > 0
    starts = head.offsets[:-1][some]
    result[some] = np.maximum.reduceat(noise[head.order], starts)
    return result
