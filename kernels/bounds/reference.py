"""The bounds, stated plainly in float64 numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.bounds.clusters import Clusters
from lexshard.kernels.bounds.query import (
    COSINE_ROUNDING,
    DOT_ROUNDING,
    FLUSHED,
    TRIGONOMETRY_ROUNDING,
    Query,
    depth,
)
from lexshard.kernels.rounding import SMALLEST_STEP
from lexshard.kernels.rows import canonical_logits

Float64s = npt.NDArray[np.float64]


def cluster_bounds(
    query: Query, clusters: Clusters, kind: str, bias: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    bounds = []
    with np.errstate(over="ignore", invalid="ignore"):
        if kind != "cone":
            bounds.append(_with_bias(_ball(query, clusters), bias))
        if kind != "ball":
            bounds.append(_with_bias(_cone(query, clusters), bias))
    return np.minimum.reduce(bounds)


def _with_bias(raw: Float64s, bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    result = raw.astype(np.float32) + bias
    return np.where(np.isnan(result), np.float32(np.inf), result)


def _dots(query: Query, vectors: npt.NDArray[np.float32]) -> Float64s:
    """[N, C], NaN where fp32 overflowed."""
    dots = canonical_logits(query.hidden, vectors, implementation="reference").astype(np.float64)
    return np.where(np.isfinite(dots), dots, np.nan)


def _ball(query: Query, clusters: Clusters) -> Float64s:
    norm = query.norm[:, None]
    dots = _dots(query, clusters.centroid)
    radius = clusters.radius.astype(np.float64)
    size = radius + clusters.largest_norm.astype(np.float64)
    slack = np.abs(dots) * DOT_ROUNDING + size * norm * depth(query.hidden.shape[1])
    return dots + radius * norm + (slack + FLUSHED)


def _cone(query: Query, clusters: Clusters) -> Float64s:
    norm = query.norm[:, None]
    columns = query.hidden.shape[1]
    dots = _dots(query, clusters.direction)
    inverse = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm > 0)
    angle = clusters.angular_radius.astype(np.float64)
    cosine_theta, sine_theta = np.cos(angle), np.sin(angle)
    rounding = COSINE_ROUNDING + depth(columns) + SMALLEST_STEP * inverse
    cosine = np.clip(dots * inverse + rounding, -1.0, 1.0)
    sine = np.sqrt((1.0 - cosine) * (1.0 + cosine))
    inside = cosine * cosine_theta + sine * sine_theta + TRIGONOMETRY_ROUNDING
    # Within the angular radius a row may point along h.
    closest = np.where(cosine >= cosine_theta, 1.0, np.minimum(inside, 1.0))
    largest = clusters.largest_norm.astype(np.float64)
    row_norm = np.where(closest > 0, largest, clusters.smallest_norm.astype(np.float64))
    slack = largest * norm * depth(columns) + FLUSHED
    result = norm * row_norm * closest + slack
    return np.where(np.isnan(dots), np.nan, result)
