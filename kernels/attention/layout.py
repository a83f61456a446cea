"""How keys and values lie in memory: blocks of 16 tokens, of one shape on every device.

A CPU keeps bfloat16 in words of two: of neighbouring places of a key, and of a place of two
neighbouring tokens' values. Processors that multiply such pairs take them as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.quantize.layout import aligned

BLOCK_SIZE = 16
_WIDTH = 16  # what the width of a head divides where words hold two


def kept_on_cpu(head_dim: int, *, rounds: bool) -> torch.dtype:
    """As what a CPU keeps keys and values of this width: bfloat16 where products round to it."""
    return torch.bfloat16 if rounds and head_dim % _WIDTH == 0 else torch.float32


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
    bfloat16 on a CPU is int32 words of two: ``[..., head_dim / 2, 16]`` and ``[..., 8, head_dim]``.
    Raises ValueError for a dtype the device's kernel cannot read.
    """
    device = torch.device(device)
    by_column = (num_blocks, kv_heads, head_dim, BLOCK_SIZE)
    by_token = (num_blocks, kv_heads, BLOCK_SIZE, head_dim)
    if device.type == "cpu" and dtype == torch.bfloat16 and head_dim % _WIDTH == 0:
        pairs = (*by_column[:2], head_dim // 2, BLOCK_SIZE)
        rows = (*by_token[:2], BLOCK_SIZE // 2, head_dim)
        caches = aligned(pairs, np.int32), aligned(rows, np.int32)
        return torch.from_numpy(caches[0]), torch.from_numpy(caches[1])
    if device.type == "cpu" and dtype != torch.float32:
        raise ValueError(
            "the KV cache of a CPU is float32, or bfloat16 where the width of a head is a multiple "
            f"of {_WIDTH}, not {dtype} of width {head_dim}"
        )
    if device.type == "cpu":
        caches = aligned(by_column, np.float32), aligned(by_token, np.float32)
        return torch.from_numpy(caches[0]), torch.from_numpy(caches[1])
    keys = torch.zeros(by_token, device=device, dtype=dtype).transpose(2, 3)
    return keys, torch.zeros(by_token, device=device, dtype=dtype)


def words_of(cache: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU's cache as its kernels take it: float32, or uint32 where it holds words of two."""
    found: npt.NDArray[Any] = cache.numpy()
    return found.view(np.uint32) if found.dtype == np.int32 else found


def widened(cache: npt.NDArray[np.uint32], axis: int) -> npt.NDArray[np.float32]:
    """Words of two bfloat16 as float32, the second of each after the first along ``axis``."""
    halves = np.stack([cache << np.uint32(16), cache & np.uint32(0xFFFF0000)], axis=axis + 1)
    shape = list(cache.shape)
    shape[axis] *= 2
    return halves.reshape(shape).view(np.float32)
