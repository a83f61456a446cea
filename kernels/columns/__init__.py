"""Logits on their way to a sampler: rows in, vocabulary-major columns and block maxima out."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.columns import cpu, reference

Implementation = Literal["reference", "cpu"]

__all__ = ["write_columns"]


def write_columns(
    rows: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float32],
    maxima: npt.NDArray[np.float32],
    *,
    implementation: Implementation | None = None,
) -> None:
    """Writes ``rows`` [B, V] transposed to ``logits`` [V, B], and what is largest to ``maxima``.

    ``maxima`` [ceil(V / 64), B] gets the largest of every 64 logits of a column, all in one pass.
    fp32, C-contiguous (``rows``: at least along a row), no NaN; nothing overlaps. Raises
    `ValueError` on shapes, types or layouts that do not fit.
    """
    count, size = rows.shape
    blocks = blocks_of(size)
    if count < 1 or size < 1 or logits.shape != (size, count) or maxima.shape != (blocks, count):
        raise ValueError(
            f"rows [B, V], logits [V, B] and maxima [ceil(V / {BLOCK}), B] expected, got "
            f"{rows.shape}, {logits.shape} and {maxima.shape}"
        )
    if any(array.dtype != np.float32 for array in (rows, logits, maxima)):
        raise ValueError("fp32 expected: convert before writing columns")
    if not (logits.flags.c_contiguous and maxima.flags.c_contiguous):
        raise ValueError("logits and maxima must be C-contiguous: they are written in one pass")
    if implementation == "reference":
        reference.write_columns(rows, logits, maxima)
    else:
        cpu.write_columns(np.ascontiguousarray(rows), logits, maxima)
