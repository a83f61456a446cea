"""The mixture draw in numba: the hot tokens alone where they hold everything that is kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from lexshard.kernels.exponential.double_precision import exponential
from lexshard.kernels.penalties.cpu import MINUS_INFINITY
from lexshard.kernels.truncate.cpu import truncate_row
from lexshard.kernels.truncate.reference import MASS_UNIT


@njit(nogil=True, cache=True)
def _reaching(logits, scale, least):  # type: ignore[no-untyped-def]
    """How many tokens have ``f64(l) * scale >= least``."""
    count = 0
    for index in range(logits.size):
        count += np.float64(logits[index]) * scale >= least
    return count


@njit(nogil=True, cache=True)
def _hot_suffices(hot_logits, logits, keep, scale, top_k, log_min_p):  # type: ignore[no-untyped-def]
    """Whether no tail token can stay beside ``keep`` of the hot ones, or take a place of theirs.

    ``keep`` is what min-p and top-k leave of the hot tokens by themselves.
    """
    kept = 0
    last = np.float32(np.inf)
    highest = MINUS_INFINITY
    for index in range(hot_logits.size):
        highest = max(highest, hot_logits[index])
        if keep[index]:
            kept += 1
            last = min(last, hot_logits[index])
    if kept == 0:
        return False
    # Without min-p and with fewer than k tokens: -inf, which every tail token reaches.
    least = np.float64(last) * scale if kept == top_k else np.float64(highest) * scale + log_min_p
    return _reaching(logits, scale, least) == _reaching(hot_logits, scale, least)


@njit(nogil=True, cache=True)
def _sums(logits, keep, scale):  # type: ignore[no-untyped-def]
    """Running sums of the kept tokens' masses, as `kernels.truncate` defines them."""
    top = MINUS_INFINITY
    for index in range(logits.size):
        if keep[index]:
            top = max(top, logits[index])
    highest = np.float64(top) * scale
    sums = np.zeros(logits.size, np.int64)
    total = 0
    for index in range(logits.size):
        if keep[index]:
            scaled = np.float64(logits[index]) * scale
            distance = 0.0 if scaled == highest else scaled - highest
            total += np.int64(np.rint(exponential(distance) * MASS_UNIT))
        sums[index] = total
    return sums


@njit(nogil=True, cache=True)
def _place(sums, uniform):  # type: ignore[no-untyped-def]
    total = sums[sums.size - 1]
    target = min(np.int64(uniform * np.float64(total)), total - 1)
    return np.searchsorted(sums, target, side="right")


@njit(nogil=True, cache=True)
def _mixture(logits, hot_ids, uniforms, scale, top_k, top_p, log_min_p):  # type: ignore[no-untyped-def]
    draws = uniforms.shape[0]
    tokens = np.full(draws, -1, np.int64)
    hot_logits = logits[hot_ids]
    hot_keep = np.empty(hot_ids.size, np.bool_)
    if top_k > 0 or log_min_p > -np.inf:
        truncate_row(hot_logits, scale, top_k, 1.0, log_min_p, hot_keep)
        if _hot_suffices(hot_logits, logits, hot_keep, scale, top_k, log_min_p):
            truncate_row(hot_logits, scale, top_k, top_p, log_min_p, hot_keep)
            sums = _sums(hot_logits, hot_keep, scale)
            for draw in range(draws):
                tokens[draw] = hot_ids[_place(sums, uniforms[draw, 1])]
            return tokens
    keep = np.empty(logits.size, np.bool_)
    if not truncate_row(logits, scale, top_k, top_p, log_min_p, keep):
        return tokens
    # One running sum per side; the other side's tokens add nothing to it.
    all_sums = _sums(logits, keep, scale)
    hot_sums = np.empty(logits.size, np.int64)
    tail_sums = np.empty(logits.size, np.int64)
    hot = 0
    before = 0
    next_hot = 0
    for token in range(logits.size):
        if next_hot < hot_ids.size and hot_ids[next_hot] == token:
            hot += all_sums[token] - before
            next_hot += 1
        before = all_sums[token]
        hot_sums[token] = hot
        tail_sums[token] = before - hot
    alpha = np.float64(hot) / np.float64(before)
    for draw in range(draws):
        side = hot_sums if uniforms[draw, 0] < alpha else tail_sums
        tokens[draw] = _place(side, uniforms[draw, 1])
    return tokens


def mixture_draw(
    logits: npt.NDArray[np.float32],
    hot_ids: npt.NDArray[np.int32],
    uniforms: npt.NDArray[np.float64],
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    log_min_p: float,
) -> npt.NDArray[np.int64]:
    return _mixture(logits, hot_ids, uniforms, inverse_temperature, top_k, top_p, log_min_p)
