"""How keys and values lie in memory: blocks of 16 tokens, of one shape on every device."""

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

    ``key_cache [num_blocks, kv_heads, head_dim, 16]`` lies so in a CPU's memory: 16 keys are scored
    side by side in vector lanes. Elsewhere every key is one run of memory, as every value of
    ``value_cache [num_blocks, kv_heads, 16, head_dim]`` is everywhere: the first is then a view.
    Raises ValueError for a dtype the device's kernel cannot read (the CPU kernel reads float32
    only).
    """
    device = torch.device(device)
    if device.type == "cpu" and dtype != torch.float32:
        raise ValueError(f"the KV cache of a CPU is float32, not {dtype}")
    by_column = (num_blocks, kv_heads, head_dim, BLOCK_SIZE)
    by_token = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
    value_cache = torch.zeros(by_token, device=device, dtype=dtype)
    if device.type == "cpu":
        return torch.zeros(by_column, dtype=dtype), value_cache
    return torch.zeros(by_token, device=device, dtype=dtype).transpose(2, 3), value_cache
