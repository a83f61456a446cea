"""What attention must know of a forward pass besides its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch


class AttentionSettings(NamedTuple):
    """What a layer asks of its attention; see `kernels.attention.paged_attention`."""

    scale: float
    window: int  # 0: none
    softcap: float


class PlannedAttention(Protocol):
    """Attention that knows the rows of a step and where their keys lie before it runs."""

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        settings: AttentionSettings,
        out: torch.Tensor,
    ) -> None:
        """Fills ``out`` [T, H, D], contiguous, for ``query`` [T, H, D] and one layer's caches."""
        ...


@dataclass(slots=True, eq=False)
class AttentionStep:
    """One forward pass: where its keys and values go and who attends whom.

    ``rows`` counts the real rows; rows behind them are padding, which is not written and attends
    nothing. ``settings`` collects what each layer asked for. ``planned``, if there is any, attends
    in the place of our kernels.
    """

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    rows: int
    slots: torch.Tensor  # [rows] int64
    row_sequence: torch.Tensor  # [rows] int32
    positions: torch.Tensor  # [rows] int32
    block_tables: torch.Tensor  # [S, max_blocks] int32
    settings: dict[int, AttentionSettings] = field(default_factory=dict)
    planned: PlannedAttention | None = None
