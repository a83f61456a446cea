"""Lloyd's algorithm in float64, stated plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


def lloyd(
    rows: npt.NDArray[np.float32],
    count: int,
    kind: str,
    seed: int,
    iterations: int,
    tick: Callable[[], None],
) -> npt.NDArray[np.int64]:
    """The cluster of every row [R]; starts from ``count`` different rows. Clusters may be empty."""
    points = rows.astype(np.float64)
    generator = np.random.Generator(np.random.Philox(key=seed))
    centroids = points[generator.permutation(len(points))[:count]]
    for _ in range(iterations):
        labels = _nearest(points, centroids, kind)
        for cluster in range(count):
            members = points[labels == cluster]
            if len(members):
                mean = members.mean(axis=0)
                length = np.linalg.norm(mean) if kind == "spherical" else 1.0
                centroids[cluster] = mean / length if length > 0 else mean
        tick()
    return _nearest(points, centroids, kind)


def _nearest(
    points: npt.NDArray[Any], centroids: npt.NDArray[Any], kind: str
) -> npt.NDArray[np.int64]:
    products = points @ centroids.T
    if kind == "spherical":
        return np.argmax(products, axis=1)
    return np.argmin(np.square(centroids).sum(axis=1) - 2.0 * products, axis=1)
