"""Models that several ranks can share, and the steps of a few texts that their bodies compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lexshard.actors.body.self_test import Piece, StepBody, pack_batch
from tests.support.tiny_models import VOCABULARY, save_tiny

LENGTHS = (61, 18, 33)
BLOCKS = 16
TABLES = [[3, 0, 9, 12], [1, 7, 0, 0], [5, 2, 11, 0]]
# What eight ranks can share; inner columns of a rank that fill no whole panel.
SHARED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 3,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {},
    "qwen2": {"use_sliding_window": False, "num_key_value_heads": 8},
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},  # layers 1 and 3 slide
}
MIXED: list[list[Piece]] = [
    [(0, 0, 50), (1, 0, 7)],
    [(0, 50, 51), (1, 7, 15), (2, 0, 30)],
    *[[(s, LENGTHS[s] - 3 + i, LENGTHS[s] - 2 + i) for s in (1, 2)] for i in range(3)],
    [(0, 51, 61)],
]
ALONE: list[list[Piece]] = [[(s, 0, length)] for s, length in enumerate(LENGTHS)]


def token_ids() -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]


def hidden_of(body: StepBody, steps: list[list[Piece]]) -> list[torch.Tensor]:
    """Hidden states of every sequence, computed in the given steps."""
    body.allocate_cache(BLOCKS)
    return computed(body, steps)


def computed(body: StepBody, steps: list[list[Piece]]) -> list[torch.Tensor]:
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for pieces in steps:
        hidden, first = body.forward(pack_batch(token_ids(), pieces, TABLES)), 0
        for sequence, start, stop in pieces:
            found[sequence].append(hidden[first : first + stop - start])
            first += stop - start
    return [torch.cat(each) if each else torch.empty(0) for each in found]


def save_shared(family: str, folder: Path, **changes: Any) -> Path:
    """A tiny model of ``family`` that eight ranks can share."""
    return save_tiny(family, folder, **{**SHARED, **OF_FAMILY[family], **changes})
