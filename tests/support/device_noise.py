"""The noise of token ids by the device's own functions, one program per 256 ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lexshard.kernels.noise.triton_kernel import gumbel_of


@triton.jit
def _kernel(ids, result, count, words, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    tokens = tl.load(ids + index, mask=inside, other=0)
    noise = gumbel_of(tokens, tl.load(words), tl.load(words + 1), tl.load(words + 2))
    tl.store(result + index, noise, mask=inside)


def device_noise(key: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """``ids`` [n] int64; the result is where they are."""
    words = torch.tensor([key & 0xFFFFFFFF, key >> 32, position], device=ids.device)
    result = torch.empty(len(ids), dtype=torch.float32, device=ids.device)
    grid = (triton.cdiv(len(ids), 256),)
    _kernel[grid](ids, result, len(ids), words, SIZE=256, enable_fp_fusion=False)
    return result
