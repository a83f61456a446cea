"""The opening in numba.

`numbers` of an opening: 0 the best known logit; 1 the log of the known mass's reference; 2 the
known mass relative to it; 3 the reference of the mass outside (infinite: to be added up); 4 that
mass, less what was opened since; 5 what it was when added up; 6 its log when last examined.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from lexshard.kernels.certify.margins import LOG_ROUNDING, SUM_ROUNDING, TERM_ROUNDING
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
from lexshard.kernels.opening.reference import EXAMINED_SHARE
from lexshard.kernels.penalties.cpu import MINUS_INFINITY, adjust_candidates
from lexshard.kernels.rows.lanes import tile
from lexshard.kernels.search.selection import key_value, order_key


@njit(nogil=True, cache=True)
def _sift_down(scores, clusters, size, place):  # type: ignore[no-untyped-def]
    """Restores the max-heap below ``place``; ties to the lower cluster."""
    score, cluster = scores[place], clusters[place]
    while 2 * place + 1 < size:
        child = 2 * place + 1
        other = child + 1
        if other < size and (
            scores[other] > scores[child]
            or (scores[other] == scores[child] and clusters[other] < clusters[child])
        ):
            child = other
        if scores[child] < score or (scores[child] == score and clusters[child] > cluster):
            break
        scores[place], clusters[place] = scores[child], clusters[child]
        place = child
    scores[place], clusters[place] = score, cluster


@njit(nogil=True, cache=True)
def _keep_best(best, value):  # type: ignore[no-untyped-def]
    """Replaces the smallest of the min-heap ``best`` by ``value`` if that is larger."""
    if not value > best[0]:
        return
    place = 0
    while 2 * place + 1 < best.size:
        child = 2 * place + 1
        if child + 1 < best.size and best[child + 1] < best[child]:
            child += 1
        if best[child] >= value:
            break
        best[place] = best[child]
        place = child
    best[place] = value


@njit(nogil=True, cache=True)
def _postprocessed(product, token, head):  # type: ignore[no-untyped-def]
    """The raw logit, or, with a soft-cap, the fp32 number below it: libraries differ in the last
    bit of ``tanh``, and only the caller's decides."""
    value = np.float32(product)
    if head.bias.size:
        value = value + head.bias[token]
    if head.scale != np.float32(1.0):
        value = value * head.scale
    if head.softcap > 0.0:
        value = np.float32(head.softcap * math.tanh(np.float64(value) / head.softcap))
        value = key_value(order_key(value) - 1)
    return value


@njit(nogil=True, cache=True)
def _absorb(ids, head, hidden, goal, adjustments, opening):  # type: ignore[no-untyped-def]
    """Makes the sorted ``ids`` known."""
    fresh = np.empty(ids.size, np.int32)
    count = 0
    for index in range(ids.size):
        if not opening.known[ids[index]]:
            opening.known[ids[index]] = True
            fresh[count] = ids[index]
            count += 1
    values = np.empty(count, np.float32)
    index = 0
    while index + 1 < count:
        pair = (np.int64(fresh[index]), np.int64(fresh[index + 1]))
        first, second = tile(head.weight, pair, hidden, (0,))
        values[index] = np.float32(first)
        values[index + 1] = np.float32(second)
        index += 2
    if index < count:
        values[index] = np.float32(tile(head.weight, (np.int64(fresh[index]),), hidden, (0,))[0])
    for index in range(count):
        opening.products[fresh[index]] = values[index]
        values[index] = _postprocessed(values[index], fresh[index], head)
    if adjustments.active[0]:
        offsets = np.array([0, count], np.int64)
        values = adjust_candidates(fresh[:count], values, offsets, adjustments)
    opening.counts[1] += count
    _learn(fresh, values, goal, opening)


@njit(nogil=True, cache=True)
def _learn(ids, values, goal, opening):  # type: ignore[no-untyped-def]
    """What the adjusted logits of known tokens say about the certificate."""
    numbers = opening.numbers
    scale = goal.inverse_temperature
    for index in range(values.size):
        value = values[index]
        if value == MINUS_INFINITY:
            continue
        if goal.kind == TOP_K:
            _keep_best(opening.best, value)
        elif goal.kind == GUMBEL:
            score = np.float64(value) * scale + np.float64(opening.noise[ids[index]])
            numbers[0] = max(numbers[0], score)
        elif goal.kind == GREEDY or goal.kind == MIN_P:
            numbers[0] = max(numbers[0], np.float64(value))
        else:
            scaled = np.float64(value) * scale
            if scaled == numbers[1]:
                numbers[2] += 1.0
            elif scaled < numbers[1]:
                numbers[2] += math.exp(scaled - numbers[1])
            else:
                numbers[2] = numbers[2] * math.exp(numbers[1] - scaled) + 1.0
                numbers[1] = scaled


@njit(nogil=True, cache=True)
def _known_log_mass(opening):  # type: ignore[no-untyped-def]
    """Rounded down. Every token may have moved the reference once."""
    reference = opening.numbers[1]
    if math.isinf(reference):
        return reference
    slack = (opening.counts[1] + 1) * TERM_ROUNDING + (abs(reference) + 1.0) * LOG_ROUNDING
    return reference + math.log(opening.numbers[2]) - slack


@njit(nogil=True, cache=True)
def outside_mass(opening):  # type: ignore[no-untyped-def]
    """The log of the mass outside, rounded up; adds it up anew."""
    size = opening.counts[0]
    numbers = opening.numbers
    top = -np.inf
    for place in range(size):
        top = max(top, opening.log_masses[opening.heap_clusters[place]])
    numbers[3] = top
    if math.isinf(top):
        return top
    total = 0.0
    for place in range(size):
        total += math.exp(opening.log_masses[opening.heap_clusters[place]] - top)
    numbers[4] = total
    numbers[5] = total
    slack = TERM_ROUNDING + size * SUM_ROUNDING + (abs(top) + 1.0) * LOG_ROUNDING
    return top + math.log(total) + slack


@njit(nogil=True, cache=True)
def _mass_is_certain(goal, opening):  # type: ignore[no-untyped-def]
    inside = _known_log_mass(opening)
    if inside == -np.inf:
        return False
    limit = inside + goal.log_odds
    if math.isfinite(limit):
        limit -= LOG_ROUNDING * (abs(inside) + abs(goal.log_odds) + 1.0)
    if goal.kind == NUCLEUS:
        limit = min(limit, opening.numbers[6] + EXAMINED_SHARE)
    numbers = opening.numbers
    if not math.isinf(numbers[3]):
        # Subtracting opened clusters one by one leaves this much uncertain; mostly it is enough.
        error = (opening.heap_scores.size + 8) * 2.0**-51 * numbers[5]
        least = numbers[4] - error
        if least > 0.0 and numbers[3] + math.log(least) > limit + 1e-9:
            return False
    outside = outside_mass(opening)
    if math.isinf(outside) or not outside <= limit:
        return False
    numbers[6] = outside
    return True


@njit(nogil=True, cache=True)
def _is_certain(goal, opening):  # type: ignore[no-untyped-def]
    """Whether the certificate holds for the clusters in the heap (one at least)."""
    highest = opening.heap_scores[0]
    if goal.kind == GREEDY or goal.kind == GUMBEL:
        return highest < opening.numbers[0]
    if goal.kind == TOP_K:
        return highest < np.float64(opening.best[0])
    if goal.kind == MIN_P:
        scale = goal.inverse_temperature
        return highest * scale < opening.numbers[0] * scale + goal.log_odds
    return _mass_is_certain(goal, opening)


@njit(nogil=True, cache=True)
def begin(head, hidden, scores, goal, adjustments, first_ids, opening):  # type: ignore[no-untyped-def]
    size = 0
    for cluster in range(scores.size):
        if scores[cluster] > -np.inf:
            opening.heap_scores[size] = scores[cluster]
            opening.heap_clusters[size] = cluster
            size += 1
    for place in range(size // 2 - 1, -1, -1):
        _sift_down(opening.heap_scores, opening.heap_clusters, size, place)
    opening.counts[0] = size
    _absorb(first_ids, head, hidden, goal, adjustments, opening)


@njit(nogil=True, cache=True)
def advance(head, hidden, goal, adjustments, opening, row_limit, cluster_limit):  # type: ignore[no-untyped-def]
    scores, clusters, counts = opening.heap_scores, opening.heap_clusters, opening.counts
    while counts[0] > 0:
        if _is_certain(goal, opening):
            return EXAMINE if goal.kind == NUCLEUS else CERTIFIED
        cluster = np.int64(clusters[0])
        start, stop = head.offsets[cluster], head.offsets[cluster + 1]
        if counts[1] + stop - start > row_limit or counts[2] >= cluster_limit:
            return SPENT
        if goal.kind == EPSILON or goal.kind == NUCLEUS:
            log_mass = opening.log_masses[cluster]
            if not math.isinf(opening.numbers[3]):
                opening.numbers[4] -= math.exp(log_mass - opening.numbers[3])
        counts[0] -= 1
        scores[0], clusters[0] = scores[counts[0]], clusters[counts[0]]
        _sift_down(scores, clusters, counts[0], 0)
        counts[2] += 1
        _absorb(head.order[start:stop], head, hidden, goal, adjustments, opening)
    return CERTIFIED
