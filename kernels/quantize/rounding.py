"""Weights in float64, and bounds rounded outward: what is stored in fp32 is never below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels import pool

ROW_BLOCK = 256  # rows in float64 at a time: 2 MiB at d = 1,024

# Every stored size is at least this: far below any real row, and times the smallest factor of a
# hidden state (2**-88) still above the spacing of fp32 numbers around zero.
SMALLEST_SIZE = 2.0**-60
Worked = TypeVar("Worked")


def round_up(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The fp32 numbers at or above ``values``, infinity where there is none."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
        return np.where(nearest < values, np.nextafter(nearest, np.float32(np.inf)), nearest)


def norms(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At least ``||rows_i||`` for ``rows`` [R, d] that carry one rounding each: [R].

    Squares, sums and root err by less than ``d + 4`` units of 2**-53.
    """
    exact = np.sqrt(np.einsum("rd,rd->r", rows, rows))
    return exact * (1.0 + (rows.shape[1] + 8) * 2.0**-52)


def row_blocks(weight: torch.Tensor, columns: int) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """(first row, rows in float64 zero-padded to ``columns``) of every block.

    Raises ValueError for weights with NaN or infinity.
    """
    for first in range(0, weight.shape[0], ROW_BLOCK):
        yield first, _widened(weight, columns, first)


def in_row_blocks(
    weight: torch.Tensor, columns: int, work: Callable[[slice, npt.NDArray[np.float64]], Worked]
) -> list[Worked]:
    """What ``work`` makes of the place of every block and its rows, in order; blocks are worked on
    in the threads of the pool. Raises as `row_blocks` does."""

    def one(first: int) -> Worked:
        rows = _widened(weight, columns, first)
        return work(slice(first, first + len(rows)), rows)

    return pool.results([partial(one, first) for first in range(0, weight.shape[0], ROW_BLOCK)])


def _widened(weight: torch.Tensor, columns: int, first: int) -> npt.NDArray[np.float64]:
    block = weight[first : first + ROW_BLOCK].detach().double().numpy()
    if not np.isfinite(block).all():
        raise ValueError("the output weights contain NaN or infinity: they cannot be quantised")
    return np.pad(block, ((0, 0), (0, columns - block.shape[1])))
