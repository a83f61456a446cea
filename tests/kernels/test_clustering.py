"""Clusters of output rows: a permutation, contiguous, deterministic, and as good as plain Lloyd."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels import pool
from lexshard.kernels.clustering import FINE, Kind, cluster

KINDS: tuple[Kind, ...] = ("euclidean", "spherical")

Order = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


def grouped(rows: int, columns: int, groups: int, seed: int) -> torch.Tensor:
    """Rows around ``groups`` centres of different lengths, with noise of a third of their size."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(groups, columns, generator=generator)
    centres *= torch.linspace(0.5, 2.0, groups)[:, None]
    chosen = torch.randint(0, groups, (rows,), generator=generator)
    return centres[chosen] + 0.3 * torch.randn(rows, columns, generator=generator)


def objective(weight: torch.Tensor, order: Order, offsets: Offsets, kind: str) -> float:
    """What k-means makes small: distances to means, or cosines to mean directions (negative)."""
    rows = weight.double().numpy()
    if kind == "spherical":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    total = 0.0
    for first, last in pairwise(offsets):
        members = rows[order[first:last]]
        if kind == "spherical":
            total += len(members) - np.linalg.norm(members.sum(axis=0))
        else:
            total += np.square(members - members.mean(axis=0)).sum()
    return float(total)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 120),
    columns=st.integers(1, 20),
    count=st.integers(1, 130),
    kind=st.sampled_from(KINDS),
    fine=st.sets(st.integers(0, 119), max_size=20),
    duplicates=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_clusters_are_a_permutation_cut_into_runs(
    rows: int,
    columns: int,
    count: int,
    kind: Kind,
    fine: set[int],
    duplicates: bool,
    seed: int,
) -> None:
    weight = grouped(rows, columns, 3, seed)
    if duplicates:
        weight = weight[torch.arange(rows) // 4]
        weight[0] = 0.0
    fine = {token for token in fine if token < rows}
    told: list[float] = []
    order, offsets = cluster(
        weight,
        count,
        kind=kind,
        fine_ids=fine,
        seed=seed,
        iterations=3,
        progress=told.append,
    )
    assert order.dtype == np.int32
    assert offsets.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(rows))
    assert offsets[0] == 0
    assert offsets[-1] == rows
    assert np.all(np.diff(offsets) > 0)  # no empty cluster
    assert len(offsets) - 1 <= max(count, 2 if fine else 1)
    assert sum(told) == pytest.approx(1.0)
    for first, last in pairwise(offsets):
        members = order[first:last]
        assert np.all(np.diff(members) > 0)
        assert len({int(token) in fine for token in members}) == 1  # never mixed


def plain_lloyd(weight: torch.Tensor, count: int, kind: str) -> tuple[Order, Offsets]:
    """Lloyd's algorithm in float64, from ``count`` different rows."""
    points = weight.double().numpy()
    if kind == "spherical":
        points = points / np.linalg.norm(points, axis=1, keepdims=True)
    centroids = points[np.random.default_rng(0).permutation(len(points))[:count]]
    for step in range(16):
        products = points @ centroids.T
        if kind == "euclidean":
            products = products - 0.5 * np.square(centroids).sum(axis=1)
        labels = products.argmax(axis=1)
        for each in np.unique(labels) if step < 15 else ():
            mean = points[labels == each].mean(axis=0)
            centroids[each] = mean / np.linalg.norm(mean) if kind == "spherical" else mean
    sizes = np.bincount(labels)
    offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])])
    return np.argsort(labels, kind="stable").astype(np.int32), offsets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_reaches_the_objective_of_plain_lloyd(kind: Kind, dtype: torch.dtype) -> None:
    """Both find local minima from random starts, which hardly differ where rows have no groups.
    Seeds are fixed, so there is no chance in the outcome."""
    weight = torch.randn(3000, 12, generator=torch.Generator().manual_seed(5)).to(dtype)
    ours = objective(weight, *cluster(weight, 60, kind=kind), kind)
    plain = objective(weight, *plain_lloyd(weight, 60, kind), kind)
    one = objective(weight, np.arange(3000, dtype=np.int32), np.array([0, 3000]), kind)
    assert ours <= 1.03 * plain
    assert plain <= 1.03 * ours
    assert ours < 0.7 * one


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_depends_on_the_arguments_alone(kind: Kind) -> None:
    weight = grouped(4000, 96, 30, seed=1)
    try:
        results = []
        for threads in (1, 2, 1):
            pool.set_threads(threads)
            results.append(cluster(weight, 50, kind=kind, seed=3))
    finally:
        pool.set_threads(1)
    for order, offsets in results[1:]:
        assert np.array_equal(order, results[0][0])
        assert np.array_equal(offsets, results[0][1])
    other, _ = cluster(weight, 50, kind=kind, seed=4)
    assert not np.array_equal(other, results[0][0])


def test_fine_grained_tokens_get_more_clusters_of_their_own() -> None:
    weight = grouped(4000, 16, 300, seed=2)
    fine = np.arange(1000, 1200)
    order, offsets = cluster(weight, 200, fine_ids=fine)
    own = int(np.isin(order[offsets[:-1]], fine).sum())
    others = len(offsets) - 1 - own
    assert set(order[: offsets[own]].tolist()) == set(fine.tolist())  # the first clusters
    assert own / 200 == pytest.approx(FINE * others / 3800, rel=0.15)


def test_few_fine_grained_tokens_still_get_a_cluster() -> None:
    order, offsets = cluster(grouped(500, 8, 5, seed=3), 4, fine_ids=[7, 9])
    assert order[: offsets[1]].tolist() == [7, 9]
    assert len(offsets) - 1 == 4


@pytest.mark.parametrize(
    ("weight", "count", "fine", "reason"),
    [
        (torch.ones(4, 2).double(), 2, (), "fp32 or bf16"),
        (torch.tensor([[1.0], [np.nan]]), 1, (), "NaN"),
        (torch.ones(4, 2), 0, (), "at least 1 cluster"),
        (torch.ones(4, 2), 2, (4,), "0 .. 3"),
        (torch.ones(4, 2), 2, (-1,), "0 .. 3"),
    ],
)
def test_what_cannot_be_clustered_is_refused(
    weight: torch.Tensor, count: int, fine: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        cluster(weight, count, fine_ids=fine)
