"""Canonical logits in Triton: one program per tile of tokens and one hidden row.

The lanes are reduced by splitting the lane axis into halves, which fixes the order of additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _halve(lanes, TOKENS: tl.constexpr, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    pairs = tl.permute(tl.reshape(lanes, (TOKENS, 2, HALF)), (0, 2, 1))
    low, high = tl.split(pairs)
    return low + high


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    ids,
    starts,
    counts,
    result,
    columns,
    hidden_stride,
    weight_stride,
    GATHER: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(1)
    first = tl.program_id(0) * TOKENS
    count = tl.load(counts + row)
    if first < count:
        index = first + tl.arange(0, TOKENS)
        inside = index < count
        start = tl.load(starts + row)
        if GATHER:
            tokens = tl.load(ids + start + index, mask=inside, other=0).to(tl.int64)
        else:
            tokens = index.to(tl.int64)
        lane = tl.arange(0, 16)
        lanes = tl.zeros((TOKENS, 16), tl.float64)
        for column in range(0, columns, 16):
            valid = column + lane < columns
            h = tl.load(hidden + row * hidden_stride + column + lane, mask=valid, other=0.0)
            w = tl.load(
                weight + tokens[:, None] * weight_stride + (column + lane)[None, :],
                mask=inside[:, None] & valid[None, :],
                other=0.0,
            )
            lanes += w.to(tl.float32).to(tl.float64) * h.to(tl.float64)[None, :]
        eight = _halve(lanes, TOKENS, 8)
        four = _halve(eight, TOKENS, 4)
        two = _halve(four, TOKENS, 2)
        one = tl.reshape(_halve(two, TOKENS, 1), (TOKENS,))
        tl.store(result + start + index, one.to(tl.float32), mask=inside)


def canonical_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> torch.Tensor:
    rows, columns = hidden.shape
    device = weight.device
    hidden = hidden.to(device=device, dtype=torch.float32).contiguous()
    size = weight.shape[0]
    if ids is None or offsets is None:
        starts = torch.arange(rows, device=device, dtype=torch.int64) * size
        counts = torch.full((rows,), size, device=device, dtype=torch.int64)
        result = torch.empty(rows * size, device=device, dtype=torch.float32)
        longest = size
    else:
        offsets = offsets.to(device=device, dtype=torch.int64)
        ids = ids.to(device).contiguous()
        starts, counts = offsets[:-1].contiguous(), offsets.diff()
        result = torch.empty(ids.numel(), device=device, dtype=torch.float32)
        longest = int(counts.max()) if rows else 0
    if result.numel():
        _kernel[(triton.cdiv(longest, 32), rows)](
            hidden,
            weight,
            ids if ids is not None else starts,
            starts,
            counts,
            result,
            columns,
            hidden.stride(0),
            weight.stride(0),
            GATHER=ids is not None,
            TOKENS=32,
            enable_fp_fusion=False,
        )
    return result if ids is not None else result.view(rows, size)
