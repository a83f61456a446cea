"""Long prompt chunks through torch's fused attention instead of the row kernel.

Faster on machines whose math library beats the row kernel, but the order of summation depends on
how a prompt is cut: a body that uses it is not batch-invariant.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from lexshard.actors.body.attention_step import AttentionStep
from lexshard.kernels.attention import BLOCK_SIZE, paged_attention

LEAST_ROWS = 32  # shorter runs gain nothing over the row kernel


def attend_by_sequence(
    query: torch.Tensor,
    step: AttentionStep,
    layer: int,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """``query [H, T, D]`` to ``out [T, H, D]``: long runs by torch, the rest by the row kernel."""
    key_cache, value_cache = step.caches[layer]
    owners = step.row_sequence.cpu().numpy()
    bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for start, stop in pairwise(bounds):
        if stop - start < LEAST_ROWS:
            paged_attention(
                query[:, start:stop].transpose(0, 1),
                key_cache,
                value_cache,
                step.block_tables,
                step.row_sequence[start:stop],
                step.positions[start:stop],
                scale,
                window,
                0.0,
                out[start:stop],
            )
            continue
        positions = step.positions[start:stop]
        length = int(positions[-1]) + 1
        blocks = step.block_tables[int(owners[start]), : -(-length // BLOCK_SIZE)].long()
        keys = key_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]  # [Hkv, keys, D]
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        place = torch.arange(length, device=positions.device)
        mask = place[None] <= positions[:, None]
        if window > 0:
            mask &= place[None] > positions[:, None] - window
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None, :, start:stop],
            keys[None].to(query.dtype),
            values[None].to(query.dtype),
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[start:stop] = attended[0].transpose(0, 1)
