"""Rows to columns as two lines of numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import BLOCK


def write_columns(
    rows: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float32],
    maxima: npt.NDArray[np.float32],
) -> None:
    logits[:] = rows.T
    maxima[:] = np.maximum.reduceat(logits, range(0, len(logits), BLOCK), axis=0)
