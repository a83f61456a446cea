"""Bounds rounded outward: what is stored in fp32 is never below what float64 stood for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Every stored size is at least this: far below any real row, and times the smallest factor of a
# hidden state (2**-88) still above the spacing of fp32 numbers around zero.
SMALLEST_SIZE = 2.0**-60


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
