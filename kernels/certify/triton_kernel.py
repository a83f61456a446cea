"""The evidence in Triton: one program per row, everything it needs in a few passes.

The k-th largest logit and the boundary of a nucleus are found bit by bit of the logits read as
integers (32 passes each over the row's own logits), so nothing is sorted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.certify.evidence import Evidence, Questions
from kernels.certify.margins import (
    HALF_A_UNIT,
    LARGEST_RATIO,
    LARGEST_VOCABULARY,
    LOG_ROUNDING,
    MASS_ROUNDING,
    SUM_ROUNDING,
    TERM_ROUNDING,
)
from kernels.exponential.double_precision import (
    COEFFICIENTS,
    INVERSE_LN2,
    LN2_HIGH,
    LN2_LOW,
    ROUNDER,
    SMALLEST,
)
from kernels.truncate.reference import MASS_UNIT

WIDTH = 1024
# Adding and subtracting this rounds a float64 below 2**51 to an integer, ties to even.
INTEGERS = 2.0**52


@triton.jit
def _order_keys(values):  # type: ignore[no-untyped-def]
    """`kernels.search.selection.order_key`"""
    bits = (values + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, (~bits) & 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _key_value(key):  # type: ignore[no-untyped-def]
    bits = tl.where((key & 0x80000000) != 0, key & 0x7FFFFFFF, (~key) & 0xFFFFFFFF)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _exponential(x, constants):  # type: ignore[no-untyped-def]
    """`kernels.exponential.double_precision`, operation by operation."""
    smallest = tl.load(constants + 4)
    clamped = tl.where(x > smallest, x, smallest)
    rounder = tl.load(constants + 3)
    n = (clamped * tl.load(constants) + rounder) - rounder
    r = (clamped - n * tl.load(constants + 1)) - n * tl.load(constants + 2)
    p = tl.zeros_like(r) + tl.load(constants + 5)
    for degree in range(6, 19):
        p = p * r + tl.load(constants + degree)
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x > smallest, p * power, 0.0)


@triton.jit
def _exponential_of_ratio(x, constants):  # type: ignore[no-untyped-def]
    """exp of a number below 13: ``exp(13) exp(x - 13)``."""
    return tl.load(constants + 27) * _exponential(x - tl.load(constants + 25), constants)


@triton.jit
def _masses(values, scale, top, constants):  # type: ignore[no-untyped-def]
    """Integer masses of `kernels.truncate`."""
    scaled = values.to(tl.float64) * scale
    distance = tl.where(scaled == top, 0.0, scaled - top)
    integers = tl.load(constants + 19)
    weight = _exponential(distance, constants) * tl.load(constants + 20)
    return ((weight + integers) - integers).to(tl.int64)


@triton.jit
def _target(top_p, total):  # type: ignore[no-untyped-def]
    wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(wanted, 1), total)


@triton.jit
def _boundary(known, count, scale, top, target, constants, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(size, key of its last token) of the best tokens that hold ``target``."""
    lane = tl.arange(0, WIDTH)
    key = tl.zeros((), tl.int64)
    one = key + 1
    for bit in range(32):
        trial = key | (one << (31 - bit))
        mass = tl.zeros((), tl.int64)
        for start in range(0, count, WIDTH):
            inside = start + lane < count
            values = tl.load(known + start + lane, mask=inside, other=float("-inf"))
            reached = inside & (_order_keys(values) >= trial)
            mass += tl.sum(tl.where(reached, _masses(values, scale, top, constants), 0))
        key = tl.where(mass >= target, trial, key)
    above = tl.zeros((), tl.int64)
    size = tl.zeros((), tl.int64)
    each = tl.zeros((), tl.int64)
    for start in range(0, count, WIDTH):
        inside = start + lane < count
        values = tl.load(known + start + lane, mask=inside, other=float("-inf"))
        masses = _masses(values, scale, top, constants)
        keys = _order_keys(values)
        better = inside & (keys > key) & (masses > 0)
        above += tl.sum(tl.where(better, masses, 0))
        size += tl.sum(better.to(tl.int64))
        each = tl.maximum(each, tl.max(tl.where(inside & (keys == key), masses, 0)))
    each = tl.maximum(each, 1)
    return size + (target - above + each - 1) // each, key


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    known,
    upper,
    sizes,
    wanted_k,
    scales,
    wanted_p,
    constants,
    threshold,
    largest_outside,
    known_log_mass,
    outside_log_mass,
    nucleus_size,
    count,
    clusters,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    known += row.to(tl.int64) * count
    upper += row.to(tl.int64) * clusters
    sizes += row.to(tl.int64) * clusters
    scale = tl.load(scales + row)
    minus_infinity = float("-inf")
    rounding = constants + 21

    # The k-th largest known logit, the largest, and the log of their mass, rounded down.
    k = tl.load(wanted_k + row)
    key = tl.zeros((), tl.int64)
    one = key + 1
    for bit in range(32):
        trial = key | (one << (31 - bit))
        reached = tl.zeros((), tl.int64)
        for start in range(0, count, WIDTH):
            inside = start + lane < count
            values = tl.load(known + start + lane, mask=inside, other=minus_infinity)
            reached += tl.sum((inside & (_order_keys(values) >= trial)).to(tl.int64))
        key = tl.where(reached >= k, trial, key)
    tl.store(threshold + row, tl.where(k <= count, _key_value(key), minus_infinity))
    highest = tl.full((), minus_infinity, tl.float32)
    for start in range(0, count, WIDTH):
        inside = start + lane < count
        values = tl.load(known + start + lane, mask=inside, other=minus_infinity)
        highest = tl.maximum(highest, tl.max(values))
    top = highest.to(tl.float64) * scale
    finite = tl.abs(top) < float("inf")
    reference = tl.where(finite, top, 0.0)
    mass = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.int64)
    for start in range(0, count, WIDTH):
        inside = start + lane < count
        values = tl.load(known + start + lane, mask=inside, other=minus_infinity)
        scaled = tl.where(finite, values.to(tl.float64) * scale, minus_infinity)
        mass += tl.sum(tl.where(inside, _exponential(scaled - reference, constants), 0.0))
        total += tl.sum(tl.where(inside, _masses(values, scale, top, constants), 0))
    slack = tl.load(rounding) + count * tl.load(rounding + 1)
    slack += (tl.abs(reference) + 1.0) * tl.load(rounding + 2)
    log_mass = tl.where(finite, reference + tl.log(tl.where(finite, mass, 1.0)) - slack, top)
    tl.store(known_log_mass + row, log_mass)

    # The largest bound outside, and the log of the mass below the bounds, rounded up.
    largest = tl.full((), minus_infinity, tl.float32)
    peak = tl.full((), minus_infinity, tl.float64)
    for start in range(0, clusters, WIDTH):
        inside = start + lane < clusters
        rows = tl.load(sizes + start + lane, mask=inside, other=0)
        bound = tl.load(upper + start + lane, mask=inside, other=minus_infinity)
        some = inside & (rows > 0)
        term = tl.log(tl.maximum(rows, 1).to(tl.float64)) + bound.to(tl.float64) * scale
        largest = tl.maximum(largest, tl.max(tl.where(some, bound, minus_infinity)))
        peak = tl.maximum(peak, tl.max(tl.where(some, term, minus_infinity)))
    bounded = tl.abs(peak) < float("inf")
    reference = tl.where(bounded, peak, 0.0)
    mass = tl.zeros((), tl.float64)
    for start in range(0, clusters, WIDTH):
        inside = start + lane < clusters
        rows = tl.load(sizes + start + lane, mask=inside, other=0)
        bound = tl.load(upper + start + lane, mask=inside, other=minus_infinity)
        term = tl.log(tl.maximum(rows, 1).to(tl.float64)) + bound.to(tl.float64) * scale
        term = tl.where(inside & (rows > 0), term - reference, minus_infinity)
        term = tl.where(bounded, term, minus_infinity)
        mass += tl.sum(_exponential(term, constants))
    slack = tl.load(rounding) + clusters * tl.load(rounding + 1)
    slack += (tl.abs(reference) + 1.0) * tl.load(rounding + 2)
    outside = tl.where(bounded, reference + tl.log(tl.where(bounded, mass, 1.0)) + slack, peak)
    tl.store(largest_outside + row, largest)
    tl.store(outside_log_mass + row, outside)

    # The nucleus: both ends of what the total of integer masses can be must give the same size.
    top_p = tl.load(wanted_p + row)
    ratio = outside - top
    empty = outside == minus_infinity
    usable = (highest > minus_infinity) & (empty | (ratio < tl.load(rounding + 4)))
    ratio = tl.where(usable & (ratio < tl.load(rounding + 4)), ratio, minus_infinity)
    most = _exponential_of_ratio(ratio, constants) * tl.load(rounding + 3) * tl.load(constants + 20)
    high = tl.ceil(most + tl.load(rounding + 5)).to(tl.int64) + 1
    high = tl.where(empty, 0, high)
    most_wanted = _target(top_p, total + high)
    usable = usable & (most_wanted <= total)
    most_wanted = tl.where(usable, most_wanted, 1)
    size, boundary = _boundary(known, count, scale, top, most_wanted, constants, WIDTH)
    least_wanted = tl.where(usable, _target(top_p, total), 1)
    least_size, _ = _boundary(known, count, scale, top, least_wanted, constants, WIDTH)
    certain = usable & (size == least_size) & (largest < _key_value(boundary))
    tl.store(nucleus_size + row, tl.where(certain, size, -1))


def _constants(device: torch.device) -> torch.Tensor:
    """float64 numbers for the kernel: as arguments they would arrive as fp32."""
    values = [INVERSE_LN2, LN2_HIGH, LN2_LOW, ROUNDER, SMALLEST, *COEFFICIENTS[::-1]]
    values += [INTEGERS, MASS_UNIT, TERM_ROUNDING, SUM_ROUNDING, LOG_ROUNDING]
    values += [1.0 + MASS_ROUNDING, LARGEST_RATIO, HALF_A_UNIT * LARGEST_VOCABULARY]
    values += [math.exp(LARGEST_RATIO)]
    return torch.tensor(values, dtype=torch.float64, device=device)


def gather_evidence(known: Any, outside_upper: Any, sizes: Any, questions: Questions) -> Evidence:
    """`kernels.certify.gather_evidence` on the device of ``known``; values are not checked."""
    device = known.device
    rows, count = known.shape

    def move(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values).to(device=device, dtype=dtype).contiguous()

    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, dtype=dtype, device=device)

    result = Evidence(
        empty(torch.float32),
        empty(torch.float32),
        empty(torch.float64),
        empty(torch.float64),
        empty(torch.int64),
    )
    if rows:
        _kernel[(rows,)](
            move(known, torch.float32),
            move(outside_upper, torch.float32),
            move(sizes, torch.int64),
            move(questions.k, torch.int64),
            move(questions.inverse_temperature, torch.float64),
            move(questions.top_p, torch.float64),
            _constants(device),
            *result,
            count,
            outside_upper.shape[1],
            WIDTH=WIDTH,
            enable_fp_fusion=False,
        )
    return result
