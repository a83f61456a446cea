"""Clusters of output rows: k-means, and a permutation that makes the clusters contiguous.

Two kinds (Lloyd's algorithm both times):

- ``euclidean``: rows to the nearest mean, least sum of squared distances;
- ``spherical``: unit rows to the mean direction with the largest cosine (Dhillon and Modha 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels import pool

Kind = Literal["euclidean", "spherical"]
Progress = Callable[[float], None]

LARGEST_SEED = 2**31 - 1  # of faiss

__all__ = ["Kind", "cluster"]

ROW_BLOCK = 8192  # rows converted at a time
FINE = 4  # clusters per token of the fine-grained part, relative to the others


def cluster(
    weight: torch.Tensor,
    count: int,
    *,
    kind: Kind = "euclidean",
    fine_ids: Collection[int] = (),
    seed: int = 0,
    iterations: int = 15,
    progress: Progress | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """``order`` [V] and ``offsets`` [C + 1]: cluster ``c`` is ``order[offsets[c]:offsets[c + 1]]``.

    ``weight`` [V, d] is fp32 or bf16 on the CPU. About ``count`` clusters are made, at most one
    per row; empty ones are left out, so ``C`` may be smaller. ``fine_ids`` (special and numeric
    tokens) get clusters of their own, the first ones, with four times as many per token as the
    others. Ids ascend within a cluster. ``progress`` is told the share of the work done since it
    was last called; the shares add up to 1.

    The result depends on the arguments alone (on the CPU also with any number of threads, as far
    as the matrix products of this faiss do). Raises ValueError for NaN, infinity, ids out of range
    and counts below 1.
    """
    if weight.ndim != 2 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weight [V, d] in fp32 or bf16 expected, got {weight.dtype}")
    if count < 1 or iterations < 1:
        raise ValueError("there must be at least 1 cluster and 1 iteration")
    vocabulary = weight.shape[0]
    fine = np.unique(np.fromiter(fine_ids, np.int64))
    if fine.size and not 0 <= fine[0] <= fine[-1] < vocabulary:
        raise ValueError(f"fine-grained token ids must lie in 0 .. {vocabulary - 1}")
    others = np.setdiff1d(np.arange(vocabulary), fine)
    fine_count = _fine_clusters(count, len(fine), len(others))
    groups = [
        (ids, clusters)
        for ids, clusters in ((fine, fine_count), (others, count - fine_count))
        if len(ids)
    ]
    labels = np.empty(vocabulary, np.int64)
    first = 0
    for ids, wanted in groups:
        clusters = min(max(wanted, 1), len(ids))
        rows = _rows(weight, ids, kind)
        step = len(ids) / vocabulary / iterations
        labels[ids] = first + _lloyd(rows, clusters, kind, seed, iterations, _ticks(progress, step))
        first += clusters
    order = np.argsort(labels, kind="stable").astype(np.int32)
    sizes = np.bincount(labels, minlength=first)
    offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)
    return order, offsets


def _fine_clusters(count: int, fine: int, others: int) -> int:
    """How many of ``count`` clusters the fine-grained tokens get: at least 1 where there are any,
    and one is left to the others."""
    if not fine or not others:
        return count if fine else 0
    share = round(count * FINE * fine / (FINE * fine + others))
    return min(max(share, 1), max(count - 1, 1))


def _rows(weight: torch.Tensor, ids: npt.NDArray[np.int64], kind: Kind) -> npt.NDArray[np.float32]:
    """The rows ``ids`` in fp32, of length 1 (or 0) for spherical clusters: [R, d]."""
    rows = np.empty((len(ids), weight.shape[1]), np.float32)
    for first in range(0, len(ids), ROW_BLOCK):
        block = weight[torch.from_numpy(ids[first : first + ROW_BLOCK])].detach().double()
        if not torch.isfinite(block).all():
            raise ValueError("the output weights contain NaN or infinity: they form no clusters")
        if kind == "spherical":
            block /= torch.linalg.vector_norm(block, dim=1, keepdim=True).clamp(min=1e-300)
        rows[first : first + ROW_BLOCK] = block.float().numpy()
    return rows


def _ticks(progress: Progress | None, step: float) -> Callable[[], None]:
    return (lambda: None) if progress is None else (lambda: progress(step))


def _lloyd(
    rows: npt.NDArray[np.float32],
    count: int,
    kind: Kind,
    seed: int,
    iterations: int,
    tick: Callable[[], None],
) -> npt.NDArray[np.int64]:
    """The cluster of every row [R], by faiss (Douze et al. 2024), on a GPU where it sees one.

    One iteration per call of faiss, each starting from the last one's centroids: the same as all
    in one call, but progress can be seen. faiss looks at 256 rows per cluster at most.
    """
    import faiss  # takes a second to load; few need it

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
    return np.asarray(nearest[:, 0])
