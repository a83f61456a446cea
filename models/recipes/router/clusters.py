"""The vocabulary of a draft model in clusters: hot tokens that are always looked at, and the rest.

A router's budget is in clusters, so they should be of one size; the rows of whole panels are read
in any case, so that size should be a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.clustering import cluster

ITERATIONS = 20  # of k-means

Ids = npt.NDArray[np.int32]


def tokens_by_frequency(drawn: npt.NDArray[np.integer], vocabulary_size: int) -> Ids:
    """Every token id [V], those drawn most often first; of equals the lower id first."""
    counts = np.bincount(drawn, minlength=vocabulary_size)
    return np.argsort(-counts, kind="stable").astype(np.int32)


def vocabulary_clusters(
    weight: torch.Tensor,
    hot: Ids,
    count: int,
    *,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> Ids:
    """The cluster of every token [V]: 0 for the ``hot`` ones, 1 .. ``count`` for the others.

    ``weight`` [V, d] are the draft's output rows; those of tokens that are not hot are clustered
    by direction (spherical k-means, DynaSpec section 4.1). Without hot tokens clusters begin at 0.
    """
    rest = np.setdiff1d(np.arange(len(weight), dtype=np.int32), hot)
    order, offsets = cluster(
        weight[torch.from_numpy(rest)],
        count,
        kind="spherical",
        seed=seed,
        iterations=ITERATIONS,
        progress=progress,
    )
    first = 1 if len(hot) else 0
    cluster_of = np.zeros(len(weight), np.int32)
    for number, (begin, end) in enumerate(pairwise(offsets)):
        cluster_of[rest[order[begin:end]]] = first + number
    return cluster_of
