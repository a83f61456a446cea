"""The opening, stated plainly: the same steps one by one, every certificate from scratch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.certify import reference as certify
from lexshard.kernels.opening.kinds import (
    CERTIFIED,
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
from lexshard.kernels.penalties.reference import adjust
from lexshard.kernels.rows import canonical_logits, postprocess

# A nucleus is examined again when the mass outside has fallen below this share of what it was.
EXAMINED_SHARE = math.log(0.8)


def _absorb(
    ids: npt.NDArray[np.int32],
    head: Head,
    hidden: npt.NDArray[np.float64],
    opening: Opening,
) -> None:
    fresh = ids[~opening.known[ids]]
    state = hidden[:, : head.weight.shape[1]].astype(np.float32)
    rows = np.ascontiguousarray(head.weight[fresh])
    opening.products[fresh] = canonical_logits(state, rows, implementation="reference")[0]
    opening.known[fresh] = True
    opening.counts[1] += len(fresh)


def _adjusted(head: Head, adjustments: Adjustments, opening: Opening) -> npt.NDArray[np.float32]:
    ids = opening.ids
    raw = postprocess(
        opening.products[ids],
        bias=head.bias[ids] if len(head.bias) else None,
        scale=float(head.scale),
        softcap=head.softcap or None,
    )
    return adjust(ids, raw, np.array([0, len(ids)]), adjustments)


def outside_mass(opening: Opening) -> float:
    clusters = opening.heap_clusters[: opening.counts[0]]
    value, slack = certify.log_sum_exp(opening.log_masses[clusters])
    return value + slack


def _is_certain(head: Head, goal: Goal, adjustments: Adjustments, opening: Opening) -> bool:
    highest, scale = float(opening.heap_scores[0]), goal.inverse_temperature
    known = _adjusted(head, adjustments, opening)
    best = float(known.max(initial=-np.inf))
    if goal.kind == GREEDY:
        return highest < best
    if goal.kind == GUMBEL:
        scores = known.astype(np.float64) * scale + opening.noise[opening.ids].astype(np.float64)
        return highest < scores.max(initial=-np.inf)
    if goal.kind == TOP_K:
        return highest < _kth_largest(known, goal.k)
    if goal.kind == MIN_P:
        return highest * scale < best * scale + goal.log_odds
    outside = outside_mass(opening)
    limit = certify.known_log_mass(known, scale) + goal.log_odds
    if goal.kind == NUCLEUS:
        limit = min(limit, opening.numbers[6] + EXAMINED_SHARE)
    if math.isinf(outside) or not outside <= limit - 1e-12 * (1.0 + abs(limit)):
        return False
    opening.numbers[6] = outside
    return True


def _kth_largest(known: npt.NDArray[np.float32], k: int) -> float:
    return float(np.sort(known)[-k]) if k <= len(known) else -math.inf


def begin(
    head: Head,
    hidden: npt.NDArray[np.float64],
    scores: npt.NDArray[np.float64],
    goal: Goal,
    adjustments: Adjustments,
    first_ids: npt.NDArray[np.int32],
    opening: Opening,
) -> None:
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > -np.inf]
    opening.counts[0] = len(order)
    opening.heap_scores[: len(order)] = scores[order]
    opening.heap_clusters[: len(order)] = order
    _absorb(first_ids, head, hidden, opening)


def advance(
    head: Head,
    hidden: npt.NDArray[np.float64],
    goal: Goal,
    adjustments: Adjustments,
    opening: Opening,
    row_limit: int,
    cluster_limit: int,
) -> int:
    while opening.counts[0]:
        if _is_certain(head, goal, adjustments, opening):
            return EXAMINE if goal.kind == NUCLEUS else CERTIFIED
        cluster = opening.heap_clusters[0]
        members = head.order[head.offsets[cluster] : head.offsets[cluster + 1]]
        spent = opening.rows_known + len(members) > row_limit
        if spent or opening.clusters_opened >= cluster_limit:
            return SPENT
        left = int(opening.counts[0]) - 1
        opening.heap_scores[:left] = opening.heap_scores[1 : left + 1]
        opening.heap_clusters[:left] = opening.heap_clusters[1 : left + 1]
        opening.counts[0] = left
        opening.counts[2] += 1
        _absorb(members, head, hidden, opening)
    return CERTIFIED
