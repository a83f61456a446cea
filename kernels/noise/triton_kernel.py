"""The draw in Triton, for other kernels: float64 throughout, without fused multiply-adds."""

from __future__ import annotations

import triton
import triton.language as tl

from lexshard.kernels.blocks import BLOCK

_BLOCK = tl.constexpr(float(BLOCK))
_BLOCK_BITS = tl.constexpr(BLOCK.bit_length() - 1)
_OFFSET_MASK = tl.constexpr(BLOCK - 1)


@triton.jit
def philox(position, block, lane, key_low, key_high):  # type: ignore[no-untyped-def]
    """Philox 4x32-10 of the counter (position, block, lane, 0); tensors of uint32."""
    x0, x1, x2, x3 = position, block, lane, tl.zeros_like(block)
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        # Widened 32-bit factors become one multiplication each.
        first = x0.to(tl.uint64) * 0xD2511F53
        second = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (second >> 32).to(tl.uint32) ^ x1 ^ k0
        x2 = (first >> 32).to(tl.uint32) ^ x3 ^ k1
        x1 = second.to(tl.uint32)
        x3 = first.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def block_draw(blocks, key_low, key_high, position):  # type: ignore[no-untyped-def]
    """(smallest exponential, winning offset) of uint32 ``blocks``; the others broadcast to them."""
    zero = tl.zeros_like(blocks)
    place = zero + position.to(tl.uint32)
    k0, k1 = zero + key_low.to(tl.uint32), zero + key_high.to(tl.uint32)
    x0, x1, x2, _ = philox(place, blocks, zero, k0, k1)
    mantissa = (x0.to(tl.uint64) << 20) | (x1 >> 12).to(tl.uint64)
    uniform = (2.0 * mantissa.to(tl.float64) + 1.0) * 1.1102230246251565e-16
    return -tl.log(1.0 - uniform) / _BLOCK, x2 & _OFFSET_MASK


@triton.jit
def token_word(ids, key_low, key_high, position):  # type: ignore[no-untyped-def]
    """The random word of uint32 ``ids``; the others broadcast to them."""
    zero = tl.zeros_like(ids)
    place = zero + position.to(tl.uint32)
    k0, k1 = zero + key_low.to(tl.uint32), zero + key_high.to(tl.uint32)
    x0, x1, x2, x3 = philox(place, ids >> _BLOCK_BITS, 1 + ((ids & _OFFSET_MASK) >> 2), k0, k1)
    part = ids & 3
    return tl.where(part == 0, x0, tl.where(part == 1, x1, tl.where(part == 2, x2, x3)))


@triton.jit
def gumbel_of(ids, key_low, key_high, position):  # type: ignore[no-untyped-def]
    """fp32 noise of a tensor of token ids; usable from other Triton kernels."""
    blocks = ids.to(tl.uint32) >> _BLOCK_BITS
    smallest, winner = block_draw(blocks, key_low, key_high, position)
    return gumbel_in_block(ids, smallest, winner, key_low, key_high, position)


@triton.jit
def gumbel_in_block(ids, smallest, winner, key_low, key_high, position):  # type: ignore[no-untyped-def]
    """`gumbel_of` where the draws of the ids' blocks are known."""
    tokens = ids.to(tl.uint32)
    word = token_word(tokens, key_low, key_high, position)
    fresh = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    exponential = tl.where(
        (tokens & _OFFSET_MASK) == winner, smallest, smallest - tl.log(1.0 - fresh)
    )
    return (-tl.log(exponential)).to(tl.float32)
