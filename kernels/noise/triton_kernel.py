"""The draw in Triton: float64 throughout, without fused multiply-adds, one program per 256 ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _philox(position, block, lane, key_low, key_high):  # type: ignore[no-untyped-def]
    """Counter words and results are uint64 tensors that hold 32-bit values."""
    x0, x1, x2, x3 = position, block, lane, tl.zeros_like(block)
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        first = x0 * 0xD2511F53
        second = x2 * 0xCD9E8D57
        x0 = (second >> 32) ^ x1 ^ k0
        x2 = (first >> 32) ^ x3 ^ k1
        x1 = second & 0xFFFFFFFF
        x3 = first & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0, x1, x2, x3


@triton.jit
def gumbel_of(ids, key_low, key_high, position):  # type: ignore[no-untyped-def]
    """fp32 noise of a tensor of int64 ids; usable from other Triton kernels."""
    tokens = ids.to(tl.uint64)
    blocks = tokens >> 6
    offsets = tokens & 63
    zero = tl.zeros_like(blocks)
    k0 = zero + key_low.to(tl.uint64)
    k1 = zero + key_high.to(tl.uint64)
    place = zero + position.to(tl.uint64)
    x0, x1, x2, x3 = _philox(place, blocks, zero, k0, k1)
    winner = x2 & 63
    mantissa = (x0 << 20) | (x1 >> 12)
    uniform = (2.0 * mantissa.to(tl.float64) + 1.0) * 1.1102230246251565e-16
    smallest = -tl.log(1.0 - uniform) / 64.0
    x0, x1, x2, x3 = _philox(place, blocks, 1 + (offsets >> 2), k0, k1)
    part = offsets & 3
    word = tl.where(part == 0, x0, tl.where(part == 1, x1, tl.where(part == 2, x2, x3)))
    fresh = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(offsets == winner, smallest, smallest - tl.log(1.0 - fresh))
    return (-tl.log(exponential)).to(tl.float32)


@triton.jit
def _kernel(ids, result, count, key_low, key_high, position, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    tokens = tl.load(ids + index, mask=inside, other=0)
    noise = gumbel_of(tokens, tl.load(key_low), tl.load(key_high), tl.load(position))
    tl.store(result + index, noise, mask=inside)


def gumbel_noise(key: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """``ids`` is an integer tensor; the result has its shape and device."""
    tokens = ids.to(torch.int64).contiguous()
    # Words travel as a tensor: scalar arguments would be specialised (and recompiled) by value.
    words = torch.tensor([key & 0xFFFFFFFF, key >> 32, position], device=ids.device)
    result = torch.empty(tokens.shape, dtype=torch.float32, device=ids.device)
    count = tokens.numel()
    grid = (triton.cdiv(count, 256),)
    _kernel[grid](
        tokens,
        result,
        count,
        words[0:],
        words[1:],
        words[2:],
        SIZE=256,
        enable_fp_fusion=False,
    )
    return result
