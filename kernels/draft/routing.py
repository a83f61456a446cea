"""The router of a draft head in numba: which clusters a step looks at."""

from __future__ import annotations

import numpy as np
from numba import njit

from kernels.exponential.single_precision import silu
from kernels.linear.cpu import multiply


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
    """Sets ``chosen [M]``: ``always``, and the ``budget`` best of the others by ``scores [M]``.

    Lower clusters come first among equals.
    """
    chosen[:] = False
    for cluster in always:
        chosen[cluster] = True
    others = scores.size - np.count_nonzero(chosen)
    if budget >= others:
        chosen[:] = True
        return
    if budget == 0:
        return
    left = np.empty(others, np.float32)
    count = 0
    for cluster in range(scores.size):
        if not chosen[cluster]:
            left[count] = scores[cluster]
            count += 1
    threshold = np.partition(left, others - budget)[others - budget]
    equal = budget - np.count_nonzero(left > threshold)
    for cluster in range(scores.size):
        if chosen[cluster] or scores[cluster] < threshold:
            continue
        if scores[cluster] == threshold:
            if equal == 0:
                continue
            equal -= 1
        chosen[cluster] = True
