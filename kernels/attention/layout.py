"""How keys and values lie in memory: blocks of 16 tokens, one layout on every device."""

from __future__ import annotations

import torch

BLOCK_SIZE = 16


def allocate_cache(
    num_blocks: int,
    kv_heads: int,
    head_dim: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed blocks of one layer.

    ``key_cache [num_blocks, kv_heads, head_dim, 16]`` is transposed inside a block, so that 16
    keys are scored side by side in vector lanes; ``value_cache [num_blocks, kv_heads, 16,
    head_dim]`` is not, so that a value is added as one run of memory. Raises ValueError for a
    dtype the device's kernel cannot read (the CPU kernel reads float32 only).
    """
    device = torch.device(device)
    if device.type == "cpu" and dtype != torch.float32:
        raise ValueError(f"the KV cache of a CPU is float32, not {dtype}")
    key_cache = torch.zeros(num_blocks, kv_heads, head_dim, BLOCK_SIZE, device=device, dtype=dtype)
    value_cache = torch.zeros(
        num_blocks, kv_heads, BLOCK_SIZE, head_dim, device=device, dtype=dtype
    )
    return key_cache, value_cache
