"""What the leaders of rows promise, in numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.noise.cpu import noise_of
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key
from lexshard.kernels.search.types import GREEDY, GUMBEL, TOP_K


@njit(nogil=True, cache=True)
def find_thresholds_of(ids, logits, offsets, needs):  # type: ignore[no-untyped-def]
    """See `kernels.search.find_thresholds`."""
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
