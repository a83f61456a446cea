"""Some rows of what lies on a device, without a wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def some_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``values`` [N, ...] of ``rows``, ascending and distinct; all of them without a copy."""
    return values if len(rows) == len(values) else values.index_select(0, _there(rows, values))


def put_rows(values: torch.Tensor, rows: Sequence[int], those: torch.Tensor) -> None:
    """``those`` [R] become the ``rows`` of ``values`` [N], ascending and distinct."""
    if rows[-1] - rows[0] + 1 == len(rows):
        values[rows[0] : rows[-1] + 1] = those
    else:
        values.index_copy_(0, _there(rows, values), those)


def _there(rows: Sequence[int], values: torch.Tensor) -> torch.Tensor:
    """``rows`` as an index beside ``values``. From memory that is not pinned, a copy would wait for
    all that the device has still to do."""
    index = torch.tensor(rows)
    return index.pin_memory().to(values.device, non_blocking=True) if values.is_cuda else index
