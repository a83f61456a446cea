"""Attention over a paged KV cache: decode, verification, chunks and prompts are one call."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from lexshard.kernels.attention import reference
from lexshard.kernels.attention.layout import BLOCK_SIZE, allocate_cache

Implementation = Literal["reference", "cpu", "triton"]

__all__ = ["BLOCK_SIZE", "allocate_cache", "paged_attention", "write_cache"]


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    implementation: Implementation | None = None,
) -> None:
    """Put ``key, value [T, Hkv, D]`` into ``slots [T] int64`` (slot = block * 16 + offset).

    Caches as `allocate_cache` makes them. Slots of one call are distinct.
    """
    _module(key, implementation).write_cache(key, value, slots, key_cache, value_cache)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    *,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """Causal attention of packed rows over their sequences' blocks: ``[T, H, D]``.

    Row ``t`` of ``query [T, H, D]`` is the token at ``positions[t]`` of sequence
    ``row_sequence[t]`` (int32, [T]) and attends the keys at positions ``0 .. positions[t]`` of
    that sequence, its own included, which must be in the cache already. Position ``p`` of
    sequence ``s`` lies in block ``block_tables[s, p // 16]`` (int32, [S, max_blocks]).

        score_j = scale * <query, key_j>
        score_j = softcap * tanh(score_j / softcap)     where softcap > 0
        out     = sum_j softmax(score)_j * value_j      over p - window < j <= p where window > 0

    Query head ``h`` reads kv head ``h // (H / Hkv)``. On the CPU everything is float32 and a
    row's bits depend on its own query, keys and values only, not on the rows beside it, the
    chunking of its prompt or where its blocks lie. ``out`` may be given; it is returned.
    """
    if query.shape[1] % key_cache.shape[1]:
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {key_cache.shape[1]} kv heads evenly"
        )
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    result: torch.Tensor = _module(query, implementation).paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        row_sequence,
        positions,
        scale,
        window,
        softcap,
        out,
    )
    return result


def _module(tensor: torch.Tensor, implementation: Implementation | None) -> ModuleType:
    chosen = implementation or ("triton" if tensor.is_cuda else "cpu")
    if chosen == "reference":
        return reference
    if chosen == "triton":
        from lexshard.kernels.attention import triton_kernel

        return triton_kernel
    from lexshard.kernels.attention import cpu  # numba compiles on first use; keep the import cheap

    return cpu
