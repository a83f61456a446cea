"""Upper bounds of the logits of whole clusters: what CSV-Decode prunes with, rounded outward.

Both dot products of a bound are canonical logits (`kernels.rows`) of centroid or direction: float64
sums rounded to fp32 once. All the rest is float64 in numpy, and one more rounding to fp32 at the
end, which is monotone and therefore keeps an inequality between float64 sums.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.bounds.clusters import Clusters, remaining_bias, summarise
from lexshard.kernels.quantize.rounding import norms
from lexshard.kernels.rounding import SMALLEST_STEP
from lexshard.kernels.rows import canonical_logits

Kind = Literal["ball", "cone", "best"]
Float64s = npt.NDArray[np.float64]

__all__ = ["Clusters", "Kind", "cluster_bounds", "remaining_bias", "summarise"]

# Twice the relative error of one rounding to fp32, so that float64 roundings fit in as well.
DOT_ROUNDING = 2.0**-23
# The rounding of the dot product, the length of the rounded direction, and as much again.
COSINE_ROUNDING = 2.0**-22
# The cosine of a difference: two products, a root, one sum.
TRIGONOMETRY_ROUNDING = 2.0**-49
# Where a device takes tiny fp32 numbers for zero.
FLUSHED = 2.0**-100


def cluster_bounds(
    hidden: npt.NDArray[np.float32] | torch.Tensor,
    clusters: Clusters,
    *,
    kind: Kind,
    largest_bias: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """Per hidden state and cluster an upper bound of every canonical logit with bias: [N, C] fp32.

    ``hidden`` [N, d] fp32. With ``mu``, ``R``, ``u``, ``theta`` of a cluster, ``n`` its largest
    norm where the cosine is positive and its smallest where it is negative, and ``phi`` the angle
    between ``h`` and ``u``:

    - ball: ``<mu, h> + R ||h|| + b`` (CSV-Decode eq. 13);
    - cone: ``||h|| n cos(max(0, phi - theta)) + b`` (eq. 14 as printed leaves out ``phi``);
    - best: the smaller of the two.

    ``b`` is the cluster's largest bias, or ``largest_bias`` [C] or [N, C] where given (see
    `remaining_bias`). The bound is at least ``fp32(canonical + bias)`` of every row, before scale,
    soft-cap and penalties, which are monotone: callers apply them. It includes every rounding, of
    its own and of the canonical logit. Where something overflows it is ``+inf``; never NaN. Empty
    clusters have ``-inf``.

    Raises `ValueError` for shapes that do not fit, NaN and infinity.
    """
    if kind not in ("ball", "cone", "best"):
        raise ValueError(f"bounds are 'ball', 'cone' or 'best', not {kind!r}")
    array = hidden.detach().numpy() if isinstance(hidden, torch.Tensor) else np.asarray(hidden)
    columns = clusters.centroid.shape[1]
    if array.ndim != 2 or array.shape[1] != columns or array.dtype != np.float32:
        raise ValueError(f"hidden [N, {columns}] in fp32 expected, got {array.shape} {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError("hidden states contain NaN or infinity: nothing can be bounded")
    bias = clusters.bias_values[:, 0] if largest_bias is None else largest_bias
    norm = norms(array.astype(np.float64))[:, None]
    bounds = []
    with np.errstate(over="ignore", invalid="ignore"):
        if kind != "cone":
            bounds.append(_with_bias(_ball(array, norm, clusters), bias))
        if kind != "ball":
            bounds.append(_with_bias(_cone(array, norm, clusters), bias))
    return np.minimum.reduce(bounds)


def _with_bias(raw: Float64s, bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    result = raw.astype(np.float32) + bias
    return np.where(np.isnan(result), np.float32(np.inf), result)


def _dots(hidden: npt.NDArray[np.float32], vectors: npt.NDArray[np.float32]) -> Float64s:
    """[N, C], NaN where fp32 overflowed."""
    dots = canonical_logits(hidden, vectors).astype(np.float64)
    return np.where(np.isfinite(dots), dots, np.nan)


def _depth(columns: int) -> float:
    """Covers, relative to ``||row|| ||h||``, the float64 sums of a canonical logit and of a bound
    (``columns`` roundings each), the rounded-up length of ``h`` and a few products."""
    return (2 * columns + 32) * 2.0**-52


def _ball(hidden: npt.NDArray[np.float32], norm: Float64s, clusters: Clusters) -> Float64s:
    dots = _dots(hidden, clusters.centroid)
    radius = clusters.radius.astype(np.float64)
    size = radius + clusters.largest_norm.astype(np.float64)
    slack = np.abs(dots) * DOT_ROUNDING + size * norm * _depth(hidden.shape[1])
    return np.asarray(dots + radius * norm + (slack + FLUSHED))


def _cone(hidden: npt.NDArray[np.float32], norm: Float64s, clusters: Clusters) -> Float64s:
    depth = _depth(hidden.shape[1])
    dots = _dots(hidden, clusters.direction)
    inverse = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)
    angle = clusters.angular_radius.astype(np.float64)
    cosine_theta, sine_theta = np.cos(angle), np.sin(angle)
    rounding = COSINE_ROUNDING + depth + SMALLEST_STEP * inverse
    cosine = np.clip(dots * inverse + rounding, -1.0, 1.0)
    sine = np.sqrt((1.0 - cosine) * (1.0 + cosine))
    inside = cosine * cosine_theta + sine * sine_theta + TRIGONOMETRY_ROUNDING
    # Within the angular radius a row may point along h.
    closest = np.where(cosine >= cosine_theta, 1.0, np.minimum(inside, 1.0))
    largest = clusters.largest_norm.astype(np.float64)
    row_norm = np.where(closest > 0, largest, clusters.smallest_norm.astype(np.float64))
    slack = largest * norm * depth + FLUSHED
    result = norm * row_norm * closest + slack
    return np.where(np.isnan(dots), np.nan, result)
