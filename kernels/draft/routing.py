"""The router of a draft head in numba: which clusters a step looks at."""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.decision.maxima import LOWEST_RANK, rank
from lexshard.kernels.decision.survivors import count_reaching
from lexshard.kernels.exponential.single_precision import silu
from lexshard.kernels.linear.cpu import multiply


@njit(nogil=True, cache=True, error_model="numpy")
def score_clusters(features, inner, inner_bias, outer, outer_bias, scores):  # type: ignore[no-untyped-def]
    """``scores [A, >= M]`` of ``features [A, 2 d]``, embeddings and the states before."""
    gates = np.empty((features.shape[0], inner_bias.size), np.float32)
    multiply(features, inner, gates, False)
    for row in range(gates.shape[0]):
        for unit in range(inner_bias.size):
            gates[row, unit] = silu(gates[row, unit] + inner_bias[unit])
    multiply(gates, outer, scores, False)
    for row in range(gates.shape[0]):
        for cluster in range(outer_bias.size):
            scores[row, cluster] += outer_bias[cluster]


@njit(nogil=True, cache=True)
def choose_clusters(scores, budget, always, chosen):  # type: ignore[no-untyped-def]
    """Sets ``chosen [M]``: ``always``, and the ``budget`` best of the others by ``scores [>= M]``.

    Lower clusters come first among equals. The scores of ``always`` do not matter.
    """
    clusters = chosen.size
    ranks = np.empty(clusters, np.int32)
    bits = scores.view(np.int32)
    for cluster in range(clusters):
        # -0.0 is 0.0, and no score is the lowest rank.
        ranks[cluster] = rank(bits[cluster]) if scores[cluster] != 0.0 else 0
        chosen[cluster] = False
    for cluster in always:
        ranks[cluster], chosen[cluster] = LOWEST_RANK, True
    if budget == 0:
        return
    # The highest rank that as many reach as may be chosen, bit by bit from the sign on.
    threshold = np.int64(LOWEST_RANK)
    for bit in range(31, -1, -1):
        higher = threshold + (np.int64(1) << bit)
        if higher < 2**31 and count_reaching(ranks, np.int32(higher)) >= budget:
            threshold = higher
    equal = budget - count_reaching(ranks, np.int32(threshold + 1))
    for cluster in range(clusters):
        if chosen[cluster] or ranks[cluster] < threshold:
            continue
        if ranks[cluster] == threshold:
            if equal == 0:
                continue
            equal -= 1
        chosen[cluster] = True
