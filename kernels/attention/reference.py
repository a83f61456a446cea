"""Paged attention as the formula says it, row by row in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.attention.layout import BLOCK_SIZE, widened, words_of
from lexshard.kernels.linear.reference import rounded


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """One assignment per token."""
    if key_cache.dtype == torch.int32:
        _write_words(key, value, slots, words_of(key_cache), words_of(value_cache))
        return
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        key_cache[block, :, :, offset] = key[token].to(key_cache.dtype)
        value_cache[block, :, offset] = value[token].to(value_cache.dtype)


def _write_words(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    key_words: npt.NDArray[np.uint32],
    value_words: npt.NDArray[np.uint32],
) -> None:
    """Rounded to bfloat16: the upper halves of float32 into halves of words."""
    keys, values = (rounded(each.float()).numpy().view(np.uint32) >> 16 for each in (key, value))
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        key_words[block, :, :, offset] = keys[token, :, ::2] | keys[token, :, 1::2] << 16
        if offset % 2 == 0:
            value_words[block, :, offset // 2] = values[token]
        else:
            value_words[block, :, offset // 2] &= 0xFFFF
            value_words[block, :, offset // 2] |= values[token] << 16


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Gathers every row's keys and values and takes their softmax in float64. Queries are rounded
    as the cache is; what values are weighted with is not."""
    if key_cache.dtype == torch.int32:
        query = rounded(query)
        key_cache = torch.from_numpy(widened(words_of(key_cache), 2))
        value_cache = torch.from_numpy(widened(words_of(value_cache), 2))
    group = query.shape[1] // key_cache.shape[1]
    for row in range(query.shape[0]):
        position = int(positions[row])
        first = max(0, position + 1 - window) if window > 0 else 0
        attended = torch.arange(first, position + 1, device=query.device)
        blocks = block_tables[int(row_sequence[row])].long()[attended // BLOCK_SIZE]
        offsets = attended % BLOCK_SIZE
        keys = key_cache[blocks, :, :, offsets].double()  # [keys, Hkv, D]
        values = value_cache[blocks, :, offsets].double()  # [keys, Hkv, D]
        keys = keys.repeat_interleave(group, dim=1)  # [keys, H, D]
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,khd->hk", query[row].double(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.softmax(dim=-1)
        out[row] = torch.einsum("hk,khd->hd", weights, values).to(out.dtype)
    return out
