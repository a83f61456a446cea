"""Canonical logits in Triton: a program per tile of tokens and one hidden row, or, where every
token is wanted, a few hidden rows, so that a weight is read and widened once for all of them.

The lanes are reduced by splitting the lane axis into halves, which fixes the order of additions.
Products are exact in float64, so it does not matter whether the compiler fuses them into the sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# Steps of 16 columns written out one after the other, so that their loads are in flight together.
LARGEST_UNROLL = 16
TOKENS = 64  # of a program that visits every token
LARGEST_ROWS = 8  # hidden rows of such a program
LARGEST_STEPS = 8  # of 16 columns that such a program of one row writes out
MOVED = 2.0**896  # by which exponents of float64 exceed those of bf16 and fp32
# Of a number whose sign stands four times before its exponent.
_ONE_SIGN, _ONE_SIGN_OF_64 = tl.constexpr(~(7 << 28)), tl.constexpr(~(7 << 60))
GATHERED_TOKENS = 4  # of a program that visits a few: more programs, more loads in flight
PROGRAMS = 2048  # enough to fill a large GPU several times


@triton.jit
def _halve(lanes, TOKENS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    pairs = tl.permute(tl.reshape(lanes, (TOKENS, 2, HALF)), (0, 2, 1))
    low, high = tl.split(pairs)
    return low + high


@triton.jit
def _added(lanes, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The canonical sums [TOKENS] of ``lanes`` [TOKENS, 16]."""
    eight = _halve(lanes, TOKENS, 8)
    four = _halve(eight, TOKENS, 4)
    two = _halve(four, TOKENS, 2)
    return tl.reshape(_halve(two, TOKENS, 1), (TOKENS,)).to(tl.float32)


class Factors(NamedTuple):
    """What is multiplied: hidden states [N, d] fp32 and output weights [V, d]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    columns: int  # d
    hidden_stride: int
    weight_stride: int

    @classmethod
    def of(cls, hidden: torch.Tensor, weight: torch.Tensor) -> Factors:
        return cls(hidden, weight, hidden.shape[1], hidden.stride(0), weight.stride(0))


@triton.jit
def row_dots(factors, row, tokens, inside, TOKENS: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The canonical logits [TOKENS] of int64 ``tokens`` with one hidden row."""
    hidden_row = factors.hidden + row * factors.hidden_stride
    lane = tl.arange(0, 16)
    lanes = tl.zeros((TOKENS, 16), tl.float64)
    for column in range(0, factors.columns, 16 * UNROLL):
        for step in tl.static_range(UNROLL):
            place = column + step * 16 + lane
            valid = place < factors.columns
            h = tl.load(hidden_row + place, mask=valid, other=0.0)
            w = tl.load(
                factors.weight + tokens[:, None] * factors.weight_stride + place[None, :],
                mask=inside[:, None] & valid[None, :],
                other=0.0,
            )
            lanes += w.to(tl.float32).to(tl.float64) * h.to(tl.float64)[None, :]
    return _added(lanes, TOKENS)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    factors,
    ids,
    starts,
    counts,
    result,
    TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Row ``r`` meets ``counts[r]`` tokens from ``starts[r]`` on.

    The programs of a row take its tiles in turn, so any number of them finishes any count.
    """
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + row)
    start = tl.load(starts + row)
    for first in range(tl.program_id(0) * TOKENS, count, tl.num_programs(0) * TOKENS):
        index = first + tl.arange(0, TOKENS)
        inside = index < count
        tokens = tl.load(ids + start + index, mask=inside, other=0).to(tl.int64)
        dots = row_dots(factors, row, tokens, inside, TOKENS, UNROLL)
        tl.store(result + start + index, dots, mask=inside)


@triton.jit
def _moved(weight):  # type: ignore[no-untyped-def]
    """Finite bf16 or fp32 values times 2^-896 as float64: their bits, moved, zero and subnormals
    too.

    Conversions to float64 come at a quarter of the rate of its products.
    """
    if weight.dtype == tl.bfloat16:
        high = weight.to(tl.int16, bitcast=True).to(tl.int32) << 13
        bits = (high & _ONE_SIGN).to(tl.int64) << 32
    else:
        bits = weight.to(tl.int32, bitcast=True).to(tl.int64) << 29
        bits &= _ONE_SIGN_OF_64
    return bits.to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _every_kernel(  # type: ignore[no-untyped-def]
    factors,
    result,
    wanted,
    rows,
    size,
    COUNTED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """ROWS hidden rows meet TOKENS tokens; each sum is added up as if it were alone.

    Where rows are COUNTED, only the first ``wanted`` are of interest.

    Hidden states are float64 times 2^896, which weights lack, and zero beyond the columns and the
    rows. Programs of the same tokens are neighbours, so that the cache has their weights.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    if COUNTED:  # noqa: SIM102  # Triton would load either way
        if first >= tl.load(wanted):
            return
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = token < size
    lane = tl.arange(0, 16)
    hidden = factors.hidden + first * factors.hidden_stride
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((TOKENS, 16), tl.float64),)  # type: ignore[assignment]
    for column in range(0, factors.columns, 16 * UNROLL):
        for step in tl.static_range(UNROLL):
            # Told that no more than two columns are neighbours, threads hold two lanes of four
            # tokens, and read 24 numbers for 64 products; of eight lanes they would read 72.
            place = tl.max_contiguous(tl.multiple_of(column + step * 16 + lane, 2), 2)
            weight = tl.load(
                factors.weight + token[:, None] * factors.weight_stride + place[None, :],
                mask=inside[:, None] & (place < factors.columns)[None, :],
                other=0.0,
            )
            wide = _moved(weight)
            added = ()
            for row in tl.static_range(ROWS):
                h = tl.load(hidden + row * factors.hidden_stride + place)
                added += (sums[row] + wide * h[None, :],)  # type: ignore[assignment]
            sums = added
    for row in tl.static_range(ROWS):
        if first + row < rows:
            tl.store(result + (first + row) * size + token, _added(sums[row], TOKENS), mask=inside)


def gathering_programs(room: int, rows: int) -> int:
    """How many programs share a row's tokens, of which there are at most ``room``."""
    return min(triton.cdiv(room, GATHERED_TOKENS), max(1, PROGRAMS // rows))


def unroll(columns: int) -> int:
    """How many steps of 16 of so many columns are written out one after the other."""
    return min(LARGEST_UNROLL, triton.next_power_of_2(triton.cdiv(columns, 16)))


def gathering(columns: int) -> dict[str, int]:
    """The options of launches that multiply a few tokens of ``columns`` columns."""
    return {"TOKENS": GATHERED_TOKENS, "UNROLL": unroll(columns), "num_warps": 2}


def canonical_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.rows.canonical_logits`. With ids the device is waited for once."""
    rows, columns = hidden.shape
    device = weight.device
    factors = Factors.of(hidden.to(device=device, dtype=torch.float32).contiguous(), weight)
    if ids is None or offsets is None:
        return every_logit(factors)
    offsets = offsets.to(device=device, dtype=torch.int64)
    ids = ids.to(device).contiguous()
    starts, counts = offsets[:-1].contiguous(), offsets.diff().int()
    result = torch.empty(ids.numel(), device=device, dtype=torch.float32)
    longest = int(counts.max()) if rows else 0
    if result.numel():
        grid = (triton.cdiv(longest, GATHERED_TOKENS), rows)
        lists = (ids, starts, counts, result)
        _kernel[grid](factors, *lists, **gathering(columns), enable_fp_fusion=True)
    return result


def every_logit(factors: Factors, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """Canonical logits [N, V] of the rows' hidden states, contiguous; waits for nothing. Of the
    first ``wanted`` [] rows alone, where the device has counted them; others' mean nothing."""
    rows, size = len(factors.hidden), len(factors.weight)
    result = torch.empty(rows, size, device=factors.weight.device, dtype=torch.float32)
    if not result.numel():
        return result
    together = min(LARGEST_ROWS, triton.next_power_of_2(rows))
    steps = max(2, LARGEST_STEPS // together)
    _every_kernel[(triton.cdiv(rows, together), triton.cdiv(size, TOKENS))](
        factors._replace(**_moved_hidden(factors.hidden, together, 16 * steps)),
        result,
        result if wanted is None else wanted,
        rows,
        size,
        COUNTED=wanted is not None,
        TOKENS=TOKENS,
        ROWS=together,
        UNROLL=steps,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return result


def _moved_hidden(hidden: torch.Tensor, rows: int, columns: int) -> dict[str, Any]:
    """``hidden`` [N, d] fp32 as `_every_kernel` reads it: multiples of so many rows and columns.

    The largest fp32 value times 2^896 is the largest that float64 has room for.
    """
    shape = [triton.cdiv(s, m) * m for s, m in zip(hidden.shape, (rows, columns), strict=True)]
    moved = torch.zeros(shape, dtype=torch.float64, device=hidden.device)
    moved[: len(hidden), : hidden.shape[1]] = hidden
    return {"hidden": moved.mul_(MOVED), "hidden_stride": shape[1]}
