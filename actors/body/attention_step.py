"""What attention must know of a forward pass besides its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True, eq=False)
class AttentionStep:
    """One forward pass: where its keys and values go and who attends whom.

    ``rows`` counts the real rows; rows behind them are padding, which is not written and attends
    nothing. ``windows`` collects what each layer asked for (0: no window).
    """

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    rows: int
    slots: torch.Tensor  # [rows] int64
    row_sequence: torch.Tensor  # [rows] int32
    positions: torch.Tensor  # [rows] int32
    block_tables: torch.Tensor  # [S, max_blocks] int32
    fast_prefill: bool = False
    windows: dict[int, int] = field(default_factory=dict)
