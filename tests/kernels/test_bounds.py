"""Bounds of clusters: never below a canonical logit, whatever rows and hidden states are aimed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.bounds import Clusters, cluster_bounds, remaining_bias, summarise
from lexshard.kernels.rows import canonical_logits, postprocess
from tests.support.cluster_cases import aimed, nearby, partition, weights

KINDS = ("ball", "cone", "best")
FLAVOURS = (
    "random",
    "clustered",
    "duplicates",
    "zero",
    "opposite",
    "huge",
    "mixed",
    "denormal",
    "one",
)


def canonical(
    hidden: np.ndarray, weight: torch.Tensor, bias: np.ndarray | None = None
) -> np.ndarray:
    return postprocess(canonical_logits(hidden, weight), bias=bias)


def largest_logits(logits: np.ndarray, clusters: Clusters) -> np.ndarray:
    """[N, C], ``-inf`` for empty clusters."""
    result = np.full((len(logits), len(clusters.radius)), -np.inf, np.float32)
    for cluster, (start, stop) in enumerate(
        zip(clusters.offsets[:-1], clusters.offsets[1:], strict=True)
    ):
        if stop > start:
            result[:, cluster] = logits[:, clusters.order[start:stop]].max(axis=1)
    return result


CASES = given(
    seed=st.integers(0, 2**32),
    flavour=st.sampled_from(FLAVOURS),
    size=st.integers(1, 60),
    columns=st.integers(1, 70),
    count=st.integers(1, 12),
    bfloat16=st.booleans(),
    biased=st.booleans(),
    near=st.booleans(),
)


def _case(
    seed: int,
    flavour: str,
    size: int,
    columns: int,
    count: int,
    bfloat16: bool,
    biased: bool,
    near: bool,
) -> tuple[torch.Tensor, np.ndarray | None, Clusters, np.ndarray]:
    random = np.random.default_rng(seed)
    weight = weights(seed, flavour, size, columns)
    weight = weight.bfloat16() if bfloat16 else weight
    bias = (3 * random.standard_normal(size)).astype(np.float32) if biased else None
    order, offsets = nearby(weight, count) if near else partition(random, size, count)
    clusters = summarise(weight, bias, order, offsets, table_size=3)
    return weight, bias, clusters, aimed(random, weight, clusters, 6)


@settings(max_examples=150)
@CASES
def test_no_bound_is_below_a_canonical_logit(**case: object) -> None:
    weight, bias, clusters, hidden = _case(**case)  # type: ignore[arg-type]
    largest = largest_logits(canonical(hidden, weight, bias), clusters)
    for kind in KINDS:
        bounds = cluster_bounds(hidden, clusters, kind=kind)
        assert bounds.dtype == np.float32
        assert not np.isnan(bounds).any()
        assert (bounds >= largest).all()


def _tight(columns: int, spread: float) -> tuple[torch.Tensor, Clusters, np.ndarray]:
    """Clusters of similar rows, and per row a hidden state along ``W_i - mu``."""
    random = np.random.default_rng(1)
    centres = random.standard_normal((10, columns))
    noise = spread * random.standard_normal((10, 12, columns))
    weight = torch.from_numpy((centres[:, None] + noise).reshape(120, columns).astype(np.float32))
    clusters = summarise(weight, None, np.arange(120, dtype=np.int32), np.arange(0, 121, 12))
    centre = np.repeat(clusters.centroid, 12, axis=0)
    hidden = 20 * (weight.numpy() - centre)
    return weight, clusters, hidden


def _violations(weight: torch.Tensor, clusters: Clusters, hidden: np.ndarray, kind: str) -> int:
    largest = largest_logits(canonical(hidden, weight), clusters)
    return int((cluster_bounds(hidden, clusters, kind=kind) < largest).sum())  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [15, 64, 300])
@pytest.mark.parametrize("kind", ["ball", "best"])
def test_a_halved_radius_is_noticed(kind: str, columns: int) -> None:
    weight, clusters, hidden = _tight(columns, 0.1)
    assert _violations(weight, clusters, hidden, kind) == 0
    halved = clusters._replace(radius=clusters.radius * np.float32(0.5))
    assert _violations(weight, halved, hidden, kind) >= 10


@pytest.mark.parametrize("columns", [15, 64, 300])
@pytest.mark.parametrize("kind", ["cone", "best"])
def test_a_halved_angle_or_norm_is_noticed(kind: str, columns: int) -> None:
    """Hidden states beyond the outermost row of every cone, at the angles where it counts."""
    weight, clusters, _ = _tight(columns, 0.1)
    rows = weight.double().numpy()
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    axis = np.repeat(clusters.direction.astype(np.float64), 12, axis=0)
    # In the plane of axis and row, turned on by the row's own angle.
    hidden = (30 * (2 * (unit * axis).sum(axis=1, keepdims=True) * unit - axis)).astype(np.float32)
    assert _violations(weight, clusters, hidden, kind) == 0
    angle = clusters._replace(angular_radius=clusters.angular_radius * np.float32(0.5))
    assert _violations(weight, angle, hidden, kind) >= 10
    norm = clusters._replace(largest_norm=clusters.largest_norm * np.float32(0.5))
    assert _violations(weight, norm, hidden, kind) >= 10
    away = np.ascontiguousarray(-hidden)
    assert _violations(weight, clusters, away, kind) == 0
    norm = clusters._replace(smallest_norm=clusters.smallest_norm * np.float32(2.0))
    assert _violations(weight, norm, away, kind) >= 10


@pytest.mark.parametrize("columns", [64, 1024])
def test_bounds_of_a_single_row_are_its_logit(columns: int) -> None:
    """Clusters of one row leave nothing but slack: 1e-5 of the size (a ball), 1e-2 (a cone)."""
    weight = weights(3, "random", 50, columns)
    hidden = weights(4, "random", 5, columns).numpy()
    clusters = summarise(weight, None, np.arange(50, dtype=np.int32), np.arange(51))
    logits = canonical(hidden, weight)
    size = np.linalg.norm(hidden, axis=1)[:, None] * clusters.largest_norm
    assert np.all(cluster_bounds(hidden, clusters, kind="ball") - logits < 1e-5 * size)
    assert np.all(cluster_bounds(hidden, clusters, kind="cone") - logits < 1e-2 * size)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 60), count=st.integers(1, 10))
def test_the_remaining_bias_bounds_every_row_not_opened(seed: int, size: int, count: int) -> None:
    random = np.random.default_rng(seed)
    weight = weights(seed, "clustered", size, 8)
    bias = (5 * random.standard_normal(size)).round().astype(np.float32)
    clusters = summarise(weight, bias, *partition(random, size, count), table_size=4)
    opened = np.flatnonzero(random.random(size) < random.random()).astype(np.int32)
    remaining = remaining_bias(clusters, opened)
    rest = np.where(np.isin(np.arange(size), opened), np.float32(-np.inf), bias)[None]
    largest = largest_logits(rest, clusters)[0]
    assert (remaining >= largest).all()
    # Exact until the table of four is used up, and for small clusters always.
    used = np.isin(clusters.bias_ids, opened).sum(axis=1)
    known = (used < 4) | (clusters.sizes <= 4)
    assert np.array_equal(remaining[known], largest[known])
    hidden = weights(seed + 1, "random", 3, 8).numpy()
    logits = canonical(hidden, weight, bias)
    logits[:, opened] = -np.inf
    bounds = cluster_bounds(hidden, clusters, kind="best", largest_bias=remaining)
    assert (bounds >= largest_logits(logits, clusters)).all()


def test_what_overflows_is_unbounded_and_not_nan() -> None:
    weight = weights(5, "random", 20, 16) * 1e38
    clusters = summarise(weight, None, np.arange(20, dtype=np.int32), np.array([0, 7, 7, 20]))
    hidden = np.concatenate([weights(6, "random", 3, 16) * 1e10, np.zeros((1, 16))])
    for kind in KINDS:
        bounds = cluster_bounds(hidden.astype(np.float32), clusters, kind=kind)  # type: ignore[arg-type]
        assert not np.isnan(bounds).any()
        assert (bounds[:, 1] == -np.inf).all()
        assert (bounds[:3, [0, 2]] == np.inf).all()


def test_what_does_not_fit_is_refused() -> None:
    weight, order = weights(7, "random", 4, 8), np.arange(4, dtype=np.int32)
    with pytest.raises(ValueError, match="each of the 4 rows once"):
        summarise(weight, None, np.zeros(4, np.int32), np.array([0, 4]))
    with pytest.raises(ValueError, match="ascend from 0 to 4"):
        summarise(weight, None, order, np.array([0, 3]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        summarise(weight * np.inf, None, order, np.array([0, 4]))
    with pytest.raises(ValueError, match="finite biases"):
        summarise(weight, np.full(4, np.nan, np.float32), order, np.array([0, 4]))
    clusters = summarise(weight, None, order, np.array([0, 4]))
    with pytest.raises(ValueError, match="'ball', 'cone' or 'best'"):
        cluster_bounds(weight.numpy(), clusters, kind="cube")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN or infinity"):
        cluster_bounds(weight.numpy() * np.inf, clusters, kind="ball")
    with pytest.raises(ValueError, match="in fp32 expected"):
        cluster_bounds(weight.numpy()[:, :7], clusters, kind="ball")


@pytest.mark.slow
@pytest.mark.parametrize("bfloat16", [False, True])
def test_no_violation_at_full_width(bfloat16: bool) -> None:
    random = np.random.default_rng(9)
    weight = weights(9, "clustered", 32_000, 1024)
    weight = weight.bfloat16() if bfloat16 else weight
    clusters = summarise(weight, None, *partition(random, 32_000, 500))
    hidden = aimed(random, weight, clusters, 64)
    largest = largest_logits(canonical(hidden, weight), clusters)
    for kind in KINDS:
        assert (cluster_bounds(hidden, clusters, kind=kind) >= largest).all()
