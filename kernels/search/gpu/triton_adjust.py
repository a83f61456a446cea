"""What happens to estimates before they are searched: post-processing, adjustments, their cost.

Arithmetic is fp32 or float64 without fused multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.rounding import INFLATION, SMALLEST_SLACK, SMALLEST_STEP, UNIT_ROUNDOFF

TILE = 1024  # ids, or adjusted tokens, of a program
# Of a row's questions: inverse temperature, ln min_p of what is searched, slope and size of the
# adjustments, top_p and ln min_p of what is drawn; frequency, presence and repetition penalty.
REALS = 9
# Of the support: row, id, bias (-inf: banned), repetition, frequency times count, presence.
ENTRY = 6

_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(TILE)
_REALS = tl.constexpr(REALS)
_ENTRY = tl.constexpr(ENTRY)
_INFLATION = tl.constexpr(INFLATION)
_SMALLEST_SLACK = tl.constexpr(SMALLEST_SLACK)
_SMALLEST_STEP = tl.constexpr(SMALLEST_STEP)
_UNIT_ROUNDOFF = tl.constexpr(UNIT_ROUNDOFF)
_SOFTCAP_ERROR = tl.constexpr(2.0**-18)


@triton.jit
def adjusted(logit, entries, entry, inside):  # type: ignore[no-untyped-def]
    """`kernels.penalties` of the tokens at ``entry`` of the support, where ``inside``."""
    terms = entries.to(tl.pointer_type(tl.float32), bitcast=True)
    place = terms + entry.to(tl.int64) * _ENTRY
    bias = tl.load(place + 2, mask=inside, other=0.0)
    repetition = tl.load(place + 3, mask=inside, other=1.0)
    result = logit + bias
    # The quotient of two fp32 values rounds correctly by way of float64.
    divided = (result.to(tl.float64) / repetition.to(tl.float64)).to(tl.float32)
    result = tl.where(result > 0, divided, result * repetition)
    result -= tl.load(place + 4, mask=inside, other=0.0)
    result -= tl.load(place + 5, mask=inside, other=0.0)
    return tl.where(inside, result, logit)


@triton.jit
def _lookup(entries, start, stop, tokens):  # type: ignore[no-untyped-def]
    """Where ``tokens`` stand among the sorted ids of ``start:stop``, and whether they do."""
    low = tl.zeros_like(tokens).to(tl.int64) + start
    high = tl.zeros_like(tokens).to(tl.int64) + stop
    span = stop - start
    while span > 0:
        searching = low < high
        middle = (low + high) >> 1
        probe = tl.load(entries + middle * _ENTRY + 1, mask=searching, other=0)
        below = probe < tokens
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (probe >= tokens), middle, high)
        span = span >> 1
    found = low < stop
    return low, found & (tl.load(entries + low * _ENTRY + 1, mask=found, other=-1) == tokens)


@triton.jit
def adjusted_by(logit, row, ids, inside, support):  # type: ignore[no-untyped-def]
    """The logits of ``ids`` of a row, adjusted where they are among its support."""
    start = tl.load(support.offsets + row)
    stop = tl.load(support.offsets + row + 1)
    if stop > start:
        entry, found = _lookup(support.entries, start, stop, ids)
        logit = adjusted(logit, support.entries, entry, found & inside)
    return logit


@triton.jit
def softcapped(logit, cap):  # type: ignore[no-untyped-def]
    ratio = logit / cap
    small = tl.exp(-2.0 * tl.abs(ratio))
    size = (1.0 - small) / (1.0 + small)
    return cap * tl.where(ratio < 0, -size, size)


@triton.jit
def finished(  # type: ignore[no-untyped-def]
    logit,
    ids,
    inside,
    bias,
    constants,
    error,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """`kernels.rows.postprocess` of canonical products, soft-capped ones ``error`` caps lower."""
    if BIAS:
        logit += tl.load(bias + ids, mask=inside, other=0.0)
    if SCALE:
        logit *= tl.load(constants + 4).to(tl.float32)
    if SOFTCAP:
        cap = tl.load(constants + 3)
        logit = (softcapped(logit.to(tl.float64), cap) - error * cap).to(tl.float32)
    return logit


@triton.jit
def norm_of(hidden, row, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm of a hidden state, float64."""
    squares = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, columns, COLUMNS):
        place = start + tl.arange(0, COLUMNS)
        value = tl.load(hidden + row * columns + place, mask=place < columns, other=0.0)
        squares += value.to(tl.float64) * value.to(tl.float64)
    return tl.sqrt(tl.sum(squares, 0))


@triton.jit
def factors_of(  # type: ignore[no-untyped-def]
    norm,
    screened,
    reals,
    constants,
    row,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The three fp32 factors that turn row slacks into the error of a row's adjusted estimates.

    Post-processing and adjusting round both the estimate and the canonical logit. Their slopes
    stretch the error, and each rounding adds ``u`` times the size of its result on either side.
    """
    largest_size = tl.load(constants)
    largest_bias = tl.load(constants + 1)
    stretch = tl.load(constants + 2)
    softcap = tl.load(constants + 3)
    terms = screened.slack_terms
    slack = screened.hidden_slack + row * terms
    error = tl.load(slack)
    size = tl.load(slack + 1)
    rest = tl.load(slack + 2, mask=terms > 2, other=0.0)
    # No canonical logit is larger, and no estimate: it is a sum of up to three such products.
    reach = 3.0 * largest_size * norm * _INFLATION
    if BIAS:
        reach += largest_bias
        rest += 4.0 * _UNIT_ROUNDOFF * reach
    if SCALE:
        reach *= stretch
        rest = rest * stretch + 4.0 * _UNIT_ROUNDOFF * reach
        error *= stretch
        size *= stretch
    if SOFTCAP:
        rest += _SOFTCAP_ERROR * softcap
    slope = tl.load(reals + row * _REALS + 2)
    adjustment = tl.load(reals + row * _REALS + 3)
    if (slope != 1.0) | (adjustment > 0.0):
        # Five operations on each side.
        rest = (rest + 16.0 * _UNIT_ROUNDOFF * (reach + adjustment)) * slope
        error *= slope
        size *= slope
    return (
        (error * _INFLATION + _SMALLEST_STEP).to(tl.float32),
        (size * _INFLATION + _SMALLEST_STEP).to(tl.float32),
        (rest * _INFLATION + _SMALLEST_STEP).to(tl.float32) + _SMALLEST_SLACK,
    )


@triton.jit
def store_factors(factors, row, error, size, rest):  # type: ignore[no-untyped-def]
    tl.store(factors + row * 3, error)
    tl.store(factors + row * 3 + 1, size)
    tl.store(factors + row * 3 + 2, rest)


@triton.jit
def postprocess_kernel(  # type: ignore[no-untyped-def]
    screened, bias, constants, BIAS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Bias, scale and soft-cap of estimates, in place (`kernels.rows.postprocess`)."""
    row = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * _TILE + tl.arange(0, _TILE)
    inside = index < screened.size
    place = screened.estimates + row * screened.width + index
    value = tl.load(place, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + index, mask=inside, other=0.0)
    if SCALE:
        value *= tl.load(constants + 4).to(tl.float32)
    if SOFTCAP:
        value = softcapped(value, tl.load(constants + 3).to(tl.float32))
    tl.store(place, value, mask=inside)


@triton.jit
def amend_kernel(support, tokens, reals):  # type: ignore[no-untyped-def]
    """One more token that a penalised row has seen, if ``tokens`` have one: it is counted where it
    stands, or takes the place that is left over behind the row's others, in order."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    start = tl.load(support.offsets + row)
    stop = tl.load(support.offsets + row + 1)
    if (token >= 0) & (tl.load(reals + row * _REALS + 8) > 0):
        step = tl.arange(0, _TILE)
        place = start
        for first in range(start, stop, _TILE):
            ids = tl.load(
                support.entries + (first + step) * _ENTRY + 1,
                mask=first + step < stop,
                other=2147483647,
            )
            place += tl.sum((ids < token).to(tl.int64), 0)
        penalties = reals + row * _REALS + 6
        frequency = tl.load(penalties).to(tl.float32)
        terms = support.entries.to(tl.pointer_type(tl.float32), bitcast=True) + place * _ENTRY
        bias = tl.zeros((), tl.float32)
        count = tl.zeros((), tl.float32)
        if tl.load(support.entries + place * _ENTRY + 1) == token:
            bias = tl.load(terms + 2)
            if frequency != 0.0:
                count = tl.floor(tl.load(terms + 4) / frequency + 0.5)
        else:
            words = (stop - 1 - place) * _ENTRY
            source = support.entries + place * _ENTRY
            for done in range(0, words, _TILE):  # from behind: none is lost
                word = words - done - _TILE + step
                moved = tl.load(source + word, mask=word >= 0, other=0)
                tl.debug_barrier()
                tl.store(source + word + _ENTRY, moved, mask=word >= 0)
                tl.debug_barrier()
        tl.store(support.entries + place * _ENTRY, row.to(tl.int32))
        tl.store(support.entries + place * _ENTRY + 1, token)
        tl.store(terms + 2, bias)
        tl.store(terms + 3, tl.load(penalties + 2).to(tl.float32))
        tl.store(terms + 4, frequency * (count + 1.0))
        tl.store(terms + 5, tl.load(penalties + 1).to(tl.float32))


@triton.jit
def adjust_kernel(screened, support, rows):  # type: ignore[no-untyped-def]
    """The adjusted estimates of the support, in place; its (row, id) pairs are distinct."""
    total = tl.load(support.offsets + rows)
    for first in range(tl.program_id(0) * _TILE, total, tl.num_programs(0) * _TILE):
        entry = first + tl.arange(0, _TILE)
        inside = entry < total
        row = tl.load(support.entries + entry * _ENTRY, mask=inside, other=0).to(tl.int64)
        token = tl.load(support.entries + entry * _ENTRY + 1, mask=inside, other=0)
        inside = inside & (token < screened.size)  # a place that is left over is no token's
        place = screened.estimates + row * screened.width + token
        value = tl.load(place, mask=inside, other=0.0)
        tl.store(place, adjusted(value, support.entries, entry, inside), mask=inside)


@triton.jit
def mask_kernel(screened, masks):  # type: ignore[no-untyped-def]
    """Estimates of tokens that the mask of their row lacks become -inf, in place."""
    row = tl.program_id(1).to(tl.int64)
    mask = tl.load(masks.places + row)
    if mask >= 0:
        index = tl.program_id(0) * _TILE + tl.arange(0, _TILE)
        inside = index < screened.size
        word = tl.load(masks.words + mask * masks.width + index // _BLOCK, mask=inside, other=0)
        held = (word >> (index % _BLOCK).to(tl.int64)) & 1
        place = screened.estimates + row * screened.width + index
        tl.store(place, float("-inf"), mask=inside & (held == 0))
