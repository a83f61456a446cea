"""Hidden states for the bounds, and the constants that their arithmetic is covered with.

Both dot products of a bound are canonical logits (`kernels.rows`) of centroid or direction: float64
sums rounded to fp32 once. All the rest is float64, and one more rounding to fp32 at the end, which
is monotone and therefore keeps an inequality between float64 sums.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.bounds.clusters import Clusters
from lexshard.kernels.quantize.rounding import norms

# Twice the relative error of one rounding to fp32, so that float64 roundings fit in as well.
DOT_ROUNDING = 2.0**-23
# The rounding of the dot product, the length of the rounded direction, and as much again.
COSINE_ROUNDING = 2.0**-22
# The cosine of a difference: two products, a root, one sum.
TRIGONOMETRY_ROUNDING = 2.0**-49
# Where a device takes tiny fp32 numbers for zero.
FLUSHED = 2.0**-100


class Query(NamedTuple):
    """N hidden states and their lengths."""

    hidden: npt.NDArray[np.float32]  # [N, d]
    norm: npt.NDArray[np.float64]  # [N], rounded up


def measure(hidden: npt.NDArray[np.float32] | torch.Tensor, clusters: Clusters) -> Query:
    """Checks ``hidden`` [N, d] and measures it. Raises `ValueError` where it does not fit."""
    array = hidden.detach().numpy() if isinstance(hidden, torch.Tensor) else np.asarray(hidden)
    columns = clusters.centroid.shape[1]
    if array.ndim != 2 or array.shape[1] != columns or array.dtype != np.float32:
        raise ValueError(f"hidden [N, {columns}] in fp32 expected, got {array.shape} {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError("hidden states contain NaN or infinity: nothing can be bounded")
    return Query(array, norms(array.astype(np.float64)))


def depth(columns: int) -> float:
    """Covers, relative to ``||row|| ||h||``, the float64 sums of a canonical logit and of a bound
    (``columns`` roundings each), the rounded-up length of ``h`` and a few products."""
    return (2 * columns + 32) * 2.0**-52
