"""Lloyd's algorithm by faiss (Douze et al. 2024), on a GPU where this faiss sees one."""

from __future__ import annotations

from collections.abc import Callable

import faiss
import numpy as np
import numpy.typing as npt

from lexshard.kernels import pool

LARGEST_SEED = 2**31 - 1


def lloyd(
    rows: npt.NDArray[np.float32],
    count: int,
    kind: str,
    seed: int,
    iterations: int,
    tick: Callable[[], None],
) -> npt.NDArray[np.int64]:
    """The cluster of every row [R].

    One iteration per call of faiss, each starting from the last one's centroids: the same as all
    in one call, but progress can be seen. faiss looks at 256 rows per cluster at most.
    """
    faiss.omp_set_num_threads(pool.threads())
    kmeans = faiss.Kmeans(
        rows.shape[1],
        count,
        niter=1,
        seed=seed % LARGEST_SEED,
        spherical=kind == "spherical",
        min_points_per_centroid=1,
        gpu=hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0,
    )
    centroids = None
    for _ in range(iterations):
        kmeans.train(rows, init_centroids=centroids)
        centroids = np.array(kmeans.centroids, np.float32)
        tick()
    _, nearest = kmeans.index.search(rows, 1)
    return nearest[:, 0]
