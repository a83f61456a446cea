"""Random heads as large as those of real models, and hidden states with likely tokens.

No model can be fetched on the machine this runs on. How long a dense head takes does not depend on
what its weights mean; how many rows a certified head rescores does. So a hidden state here points
to 64 tokens, whose logits fall from 20 to 8, and has noise that gives the logits of all others a
standard deviation of 2.5: a best token, a tail of others, and a crowd below them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from lexshard.kernels.quantize import Kind, Tier, quantize

LIKELY_TOKENS = 64
HIGHEST_LOGIT = 20.0
LOWEST_LOGIT = 8.0  # of a likely token
CROWD = 2.5
ROWS_AT_A_TIME = 2048


@dataclass(frozen=True, slots=True)
class HeadDimensions:
    """``vocabulary`` x ``columns``, and a model that has such a head."""

    model: str
    vocabulary: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.vocabulary:,} x {self.columns:,}"


HEADS = (
    HeadDimensions("Llama 3.1 8B", 128_256, 4_096),
    HeadDimensions("Qwen 2.5 7B", 151_936, 3_584),
    HeadDimensions("Gemma 2 2B", 262_144, 2_304),
)


def make_weight(dimensions: HeadDimensions, seed: int, device: str) -> torch.Tensor:
    """[V, d] bf16 with rows of length about 1."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(
        dimensions.vocabulary,
        dimensions.columns,
        generator=generator,
        device=device,
        dtype=torch.float32,
    )
    return (weight / dimensions.columns**0.5).bfloat16()


def make_hidden(weight: torch.Tensor, rows: int, seed: int) -> torch.Tensor:
    """[N, d] fp32 on the device of ``weight``."""
    generator = torch.Generator(weight.device).manual_seed(seed)
    size, columns = weight.shape
    count = min(LIKELY_TOKENS, size)
    tokens = torch.randint(size, (rows, count), generator=generator, device=weight.device)
    logits = torch.linspace(HIGHEST_LOGIT, LOWEST_LOGIT, count, device=weight.device)
    likely = weight[tokens].float()  # [N, 64, d]
    likely = likely / likely.square().sum(dim=2, keepdim=True)
    # What the likely directions give the crowd already, the noise need not.
    spread = max(0.0, CROWD**2 - float(logits.square().sum()) / columns) ** 0.5
    noise = torch.randn(rows, columns, generator=generator, device=weight.device)
    return spread * noise + torch.einsum("k,nkd->nd", logits, likely)


def quantize_in_parallel(weight: torch.Tensor, kind: Kind, threads: int) -> Tier:
    """`kernels.quantize.quantize` of blocks of rows in threads, put together again.

    The same integers and bounds as from one call; only the room for hidden states is that of the
    block with the least.
    """
    blocks = weight.split(ROWS_AT_A_TIME)
    with ThreadPoolExecutor(threads) as pool:
        tiers: list[Any] = list(pool.map(lambda block: quantize(block, kind), blocks))
    first = tiers[0]
    joined: dict[str, Any] = {
        "largest_size": max(tier.largest_size for tier in tiers),
        "hidden_limit": min(tier.hidden_limit for tier in tiers),
    }
    for field in fields(first):
        value = getattr(first, field.name)
        if field.name == "coins" or not isinstance(value, np.ndarray):
            continue
        axis = 1 if field.name.endswith("row_slack") else 0
        joined[field.name] = np.concatenate([getattr(tier, field.name) for tier in tiers], axis)
    result: Tier = replace(first, **joined)
    return result
