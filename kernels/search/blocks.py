"""Rows in blocks of 64 ids: estimates, their bounds, and what adjustments make of a block's bound.

A ceiling of a block is a bound on the adjusted value of every token in it, found without a look at
its tokens. Only blocks whose ceiling can matter are read.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.copies import copy_into
from lexshard.kernels.masks import allows
from lexshard.kernels.noise.cpu import SIX, block_draw, noise_ceiling, noise_of
from lexshard.kernels.penalties.cpu import (
    MINUS_INFINITY,
    adjust_allowed_token,
    lower_bound,
    most_repeated,
    raised,
)
from lexshard.kernels.rounding import (
    INFLATION,
    NOISE_ROUNDING,
    SMALLEST_SLACK,
    SMALLEST_STEP,
    ULP_SHARE,
)

# The factors of estimates that are searched as they are.
NO_SLACK = (np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0))


@njit(nogil=True, cache=True)
def slack_factors(hidden_slack):  # type: ignore[no-untyped-def]
    """The fp32 factors of `kernels.search.reference.outward`: of the two slacks of a token, the
    slack of every token, and the share of the value itself."""
    return (
        np.float32(hidden_slack[0] * INFLATION + SMALLEST_STEP),
        np.float32(hidden_slack[1] * INFLATION + SMALLEST_STEP),
        np.float32(np.float32(hidden_slack[2] * INFLATION + SMALLEST_STEP) + SMALLEST_SLACK),
        ULP_SHARE,
    )


@njit(nogil=True, cache=True)
def upper_bounds(values, row_slack, factors, first, upper):  # type: ignore[no-untyped-def]
    """Writes the upper bounds ``upper`` [n] of the tokens from ``first`` on."""
    error, size, rest, share = factors
    stop = first + upper.size
    estimates = values[first:stop]
    errors = row_slack[0, first:stop]
    sizes = row_slack[1, first:stop]
    for i in range(upper.size):
        slack = error * errors[i] + size * sizes[i] + rest
        upper[i] = estimates[i] + (slack + abs(estimates[i]) * share)


@njit(nogil=True, cache=True)
def block_bounds(maxima, block_slack, factors):  # type: ignore[no-untyped-def]
    """Per block a bound on every upper bound in it, from the largest estimate and slacks; minus
    infinity where that is."""
    error, size, rest, share = factors
    result = np.empty(maxima.size, np.float32)
    for block in range(maxima.size):
        highest = maxima[block]
        slack = error * block_slack[0, block] + size * block_slack[1, block] + rest
        # Twice the share: the estimate behind the largest bound may be another, a rounding away.
        bound = highest + (slack + np.float32(2.0) * abs(highest) * share)
        result[block] = bound if highest > MINUS_INFINITY else MINUS_INFINITY
    return result


@njit(nogil=True, cache=True, inline="always")
def number_of(block, token_ids):  # type: ignore[no-untyped-def]
    """Which block of the vocabulary the rows of ``block`` are."""
    if token_ids.size == 0:
        return np.uint64(block)
    return np.uint64(token_ids[block * BLOCK]) >> SIX


@njit(nogil=True, cache=True)
def noise_ceilings(  # type: ignore[no-untyped-def]
    key, position, token_ids, by_block, size, first, last, result
):
    """Of the blocks ``first`` to ``last - 1`` a bound on every noise in each."""
    for block in range(first, last):
        if by_block:
            uniform, _ = block_draw(key, position, number_of(block, token_ids))
            result[block] = noise_ceiling(uniform)
        else:
            highest = -np.inf
            for row in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
                highest = max(highest, np.float64(noise_of(key, position, token_ids[row])))
            result[block] = highest + NOISE_ROUNDING


@njit(nogil=True, cache=True, inline="always")
def _token_bound(values, row_slack, factors, token, row, a):  # type: ignore[no-untyped-def]
    """The adjusted upper bound of one token that is allowed."""
    error, size, rest, share = factors
    value = values[token]
    slack = error * row_slack[0, token] + size * row_slack[1, token] + rest
    return adjust_allowed_token(value + (slack + abs(value) * share), token, row, a)


@njit(nogil=True, cache=True)
def cover(ceilings, values, row_slack, factors, size, row, a):  # type: ignore[no-untyped-def]
    """Makes bounds on every raw bound of a block, of what the row's mask holds, ceilings of the
    adjusted bounds.

    Penalties raise by no more than the token that gains most from them. Only positive biases raise:
    those are looked at token by token.
    """
    if a.table[row] >= 0:  # `raised` does nothing else, but takes a while to get its arguments
        most = most_repeated(row, a)
        for block in range(ceilings.size):
            ceilings[block] = raised(ceilings[block], row, a, most)
    end = lower_bound(a.bias_ids, a.bias_offsets[row], a.bias_offsets[row + 1], size)
    for index in range(a.bias_offsets[row], end):
        token = np.int64(a.bias_ids[index])
        if a.bias_values[index] > 0.0 and (a.mask[row] < 0 or allows(a.masks[a.mask[row]], token)):
            bound = _token_bound(values, row_slack, factors, token, row, a)
            ceilings[token // BLOCK] = max(ceilings[token // BLOCK], bound)


@njit(nogil=True, cache=True)
def joined(ids, room, counts):  # type: ignore[no-untyped-def]
    """``counts`` of ``ids`` from each place of ``room`` on, side by side, and where they begin and
    end."""
    offsets = np.zeros(counts.size + 1, np.int64)
    for part in range(counts.size):
        offsets[part + 1] = offsets[part] + counts[part]
    result = np.empty(offsets[counts.size], np.int32)
    for part in range(counts.size):
        begin = room[part]
        copy_into(result[offsets[part] : offsets[part + 1]], ids[begin : begin + counts[part]])
    return result, offsets
