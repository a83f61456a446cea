"""The bounds in numba: canonical dot products, then one loop over hidden states and clusters."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

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


@njit(nogil=True, cache=True, inline="always")
def _with_bias(raw, bias):  # type: ignore[no-untyped-def]
    result = np.float32(raw) + bias
    return result if result == result else np.float32(np.inf)


@njit(nogil=True, cache=True)
def _balls(dots, norm, radius, largest_norm, rounding, bias, result):  # type: ignore[no-untyped-def]
    for row in range(dots.shape[0]):
        for cluster in range(dots.shape[1]):
            dot = np.float64(dots[row, cluster])
            if not math.isfinite(dot):
                result[row, cluster] = np.float32(np.inf)
                continue
            reach = np.float64(radius[cluster])
            size = reach + np.float64(largest_norm[cluster])
            slack = abs(dot) * DOT_ROUNDING + size * norm[row] * rounding
            raw = dot + reach * norm[row] + (slack + FLUSHED)
            result[row, cluster] = _with_bias(raw, bias[row, cluster])


@njit(nogil=True, cache=True)
def _cones(  # type: ignore[no-untyped-def]
    dots, norm, cosine_theta, sine_theta, largest_norm, smallest_norm, rounding, bias, result
):
    """Lowers ``result`` to the bounds of the cones."""
    for row in range(dots.shape[0]):
        inverse = 1.0 / norm[row] if norm[row] > 0.0 else 0.0
        cosine_rounding = COSINE_ROUNDING + rounding + SMALLEST_STEP * inverse
        for cluster in range(dots.shape[1]):
            dot = np.float64(dots[row, cluster])
            if not math.isfinite(dot):
                continue
            cosine = min(max(dot * inverse + cosine_rounding, -1.0), 1.0)
            closest = 1.0
            if cosine < cosine_theta[cluster]:
                sine = math.sqrt((1.0 - cosine) * (1.0 + cosine))
                closest = cosine * cosine_theta[cluster] + sine * sine_theta[cluster]
                closest = min(closest + TRIGONOMETRY_ROUNDING, 1.0)
            largest = np.float64(largest_norm[cluster])
            row_norm = largest if closest > 0.0 else np.float64(smallest_norm[cluster])
            slack = largest * norm[row] * rounding + FLUSHED
            bound = _with_bias(norm[row] * row_norm * closest + slack, bias[row, cluster])
            result[row, cluster] = min(result[row, cluster], bound)


def cluster_bounds(
    query: Query, clusters: Clusters, kind: str, bias: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    rounding = depth(query.hidden.shape[1])
    result = np.full((len(query.hidden), len(clusters.radius)), np.inf, np.float32)
    if kind != "cone":
        dots = canonical_logits(query.hidden, clusters.centroid)
        _balls(dots, query.norm, clusters.radius, clusters.largest_norm, rounding, bias, result)
    if kind != "ball":
        dots = canonical_logits(query.hidden, clusters.direction)
        angle = clusters.angular_radius.astype(np.float64)
        _cones(
            dots,
            query.norm,
            np.cos(angle),
            np.sin(angle),
            clusters.largest_norm,
            clusters.smallest_norm,
            rounding,
            bias,
            result,
        )
    return result
