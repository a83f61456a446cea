"""Output weights in float64, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

ROW_BLOCK = 256  # rows in float64 at a time: 2 MiB at d = 1,024


def row_blocks(weight: torch.Tensor, columns: int) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """(first row, rows in float64 zero-padded to ``columns``) of every block.

    Raises ValueError for weights with NaN or infinity.
    """
    for first in range(0, weight.shape[0], ROW_BLOCK):
        block = weight[first : first + ROW_BLOCK].detach().double().numpy()
        if not np.isfinite(block).all():
            raise ValueError("the output weights contain NaN or infinity: they cannot be quantised")
        yield first, np.pad(block, ((0, 0), (0, columns - block.shape[1])))
