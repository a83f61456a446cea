"""Clusters with near centroids on the same shard."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ITERATIONS = 64

Ids = npt.NDArray[np.int64]


def semantic_parts(
    centroid: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], shards: int
) -> list[Ids]:
    """The clusters of every shard, ascending, from ``centroid`` [C, d] and ``rows`` [C].

    All clusters are cut in two along the direction in which their centroids differ most (the first
    principal component, weighted by rows), each part with rows in proportion to the shards it is
    for, and so on until every part is a shard's.
    """
    parts: list[Ids] = []
    left = [(np.arange(len(rows)), shards)]
    while left:
        part, count = left.pop()
        if count == 1:
            parts.append(np.sort(part))
            continue
        order = part[np.argsort(_projections(centroid[part], rows[part]), kind="stable")]
        first = count // 2
        cut = _cut(rows[order], first, count)
        left += [(order[cut:], count - first), (order[:cut], first)]
    return parts


def _cut(rows: npt.NDArray[np.int64], first: int, count: int) -> int:
    """How many leave ``first / count`` of all rows before the cut, and a cluster per shard on
    either side."""
    before = np.cumsum(rows)
    nearest = int(np.argmin(np.abs(before - before[-1] * first / count))) + 1
    return min(max(nearest, first), len(rows) - (count - first))


def _projections(
    centroid: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Where every centroid lies [C] along their first principal component, by power iteration."""
    centred = centroid.astype(np.float64)
    centred -= np.average(centred, axis=0, weights=rows)
    direction = centred[np.argmax(np.square(centred).sum(axis=1))].copy()
    for _ in range(_ITERATIONS):
        length = np.linalg.norm(direction)
        if length == 0:  # all centroids are the same
            break
        direction = centred.T @ (rows * (centred @ (direction / length)))
    return centred @ direction
