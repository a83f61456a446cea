"""Opening clusters: the loop in numba takes the steps of the plain one, and stops where it says."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.kernels import opening as openings
from lexshard.kernels.bounds import cluster_bounds, summarise
from lexshard.kernels.noise import gumbel_row
from lexshard.kernels.opening import CERTIFIED, EXAMINE, SPENT, Goal, Head, Opening
from lexshard.kernels.rows import canonical_logits, postprocess
from tests.support.cluster_cases import partition, weights
from tests.support.penalty_cases import random_adjustment

settings.register_profile("opening", deadline=None, max_examples=100)
settings.load_profile("opening")

KINDS = (
    openings.GREEDY,
    openings.GUMBEL,
    openings.TOP_K,
    openings.MIN_P,
    openings.EPSILON,
    openings.NUCLEUS,
)


class Case:
    """A small head in clusters and one row."""

    def __init__(self, seed: int, kind: int, size: int, count: int, post: bool) -> None:
        random = np.random.default_rng(seed)
        columns = int(random.integers(1, 40))
        self.weight = weights(seed, "clustered", size, columns)
        bias = random.standard_normal(size).astype(np.float32) if post else None
        self.softcap, scale = (20.0, 0.5) if post else (None, 1.0)
        order, offsets = partition(random, size, count)
        clusters = summarise(self.weight, bias, order, offsets)
        for start, stop in pairwise(offsets):
            order[start:stop].sort()
        self.head = Head(
            self.weight.numpy(),
            np.empty(0, np.float32) if bias is None else bias,
            np.float32(scale),
            self.softcap or 0.0,
            order,
            offsets,
        )
        self.hidden = random.standard_normal(columns).astype(np.float32)
        bounds = cluster_bounds(self.hidden[None], clusters, kind="best")
        upper = postprocess(bounds, scale=scale, softcap=self.softcap)[0]
        self.upper = np.nextafter(upper, np.float32(np.inf))
        odds = {openings.MIN_P: math.log(0.1), openings.EPSILON: -3.0, openings.NUCLEUS: -2.0}
        self.goal = Goal(kind, 5, odds.get(kind, 0.0), float(np.float32(1 / 0.7)))
        self.noise = gumbel_row(seed, 3, size)
        adjustment = random_adjustment(random, size) if random.random() < 0.5 else None
        self.adjustments = flatten_adjustments([adjustment])
        self.first = np.unique(random.integers(0, size, random.integers(0, 4))).astype(np.int32)

    def begin(self, implementation: str) -> Opening:
        return openings.begin(
            self.head,
            self.hidden,
            self.upper,
            self.goal,
            self.adjustments,
            self.first,
            self.noise,
            implementation=implementation,  # type: ignore[arg-type]
        )

    def advance(self, opening: Opening, implementation: str, rows: int, clusters: int) -> int:
        return openings.advance(
            self.head,
            self.hidden,
            self.goal,
            self.adjustments,
            opening,
            row_limit=rows,
            cluster_limit=clusters,
            implementation=implementation,  # type: ignore[arg-type]
        )


CASES = given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    size=st.integers(5, 120),
    count=st.integers(1, 30),
    post=st.booleans(),
    share=st.floats(0.0, 1.2),
)


@CASES
def test_cpu_equals_reference(
    seed: int, kind: int, size: int, count: int, post: bool, share: float
) -> None:
    """Resumed with larger and larger limits, as the head does."""
    case = Case(seed, kind, size, count, post)
    got, want = case.begin("cpu"), case.begin("reference")
    for rows, clusters in ((int(share * size), size), (size, int(share * count)), (size, size)):
        status = case.advance(got, "cpu", rows, clusters)
        assert status == case.advance(want, "reference", rows, clusters)
        assert np.array_equal(got.ids, want.ids)
        assert np.array_equal(got.products[got.ids], want.products[want.ids])
        assert got.counts.tolist() == want.counts.tolist()
        if kind in (openings.EPSILON, openings.NUCLEUS):
            ours, theirs = openings.outside_log_mass(got), case_outside(want)
            assert np.allclose(ours, theirs, rtol=1e-10)


def case_outside(opening: Opening) -> tuple[float, float]:
    return openings.outside_log_mass(opening, implementation="reference")


@CASES
def test_limits_are_never_exceeded(
    seed: int, kind: int, size: int, count: int, post: bool, share: float
) -> None:
    case = Case(seed, kind, size, count, post)
    opening = case.begin("cpu")
    limit = max(int(share * size), opening.rows_known)
    while (status := case.advance(opening, "cpu", limit, 7)) == EXAMINE:
        pass
    assert opening.rows_known <= limit
    assert opening.clusters_opened <= 7
    assert opening.rows_known == opening.known.sum()
    if status == SPENT:
        sizes = np.diff(case.head.offsets)
        following = sizes[opening.heap_clusters[0]]
        assert opening.rows_known + following > limit or opening.clusters_opened == 7


def test_products_are_canonical() -> None:
    case = Case(5, openings.EPSILON, 80, 9, True)
    opening = case.begin("cpu")
    assert case.advance(opening, "cpu", 10**6, 10**6) == CERTIFIED
    every = canonical_logits(case.hidden[None], case.weight)[0]
    assert opening.clusters_opened > 0
    assert np.array_equal(opening.products[opening.ids], every[opening.ids])


def test_the_mass_outside_survives_cancellation() -> None:
    """Clusters whose masses differ by a factor of e**300: what is left after the large ones cannot
    come from subtraction."""
    count = 40
    weight = np.arange(count, 0, -1, dtype=np.float32)[:, None]
    head = Head(
        weight,
        np.empty(0, np.float32),
        np.float32(1.0),
        0.0,
        np.arange(count, dtype=np.int32),
        np.arange(count + 1),
    )
    hidden = np.array([300.0], np.float32)
    upper = (weight[:, 0] + 0.5) * hidden
    goal = Goal(openings.EPSILON, 0, math.log(1e-9), 1.0)
    nothing = flatten_adjustments([None])
    opening = openings.begin(head, hidden, upper, goal, nothing, np.empty(0, np.int32))
    status = openings.advance(
        head, hidden, goal, nothing, opening, row_limit=count, cluster_limit=count
    )
    assert status == CERTIFIED
    assert opening.clusters_opened == 1
    outside, largest = openings.outside_log_mass(opening)
    assert math.isclose(outside, 39.5 * 300, rel_tol=1e-9)
    assert largest == 39.5 * 300


def test_a_draw_without_noise_is_refused() -> None:
    case = Case(6, openings.GUMBEL, 20, 3, False)
    with pytest.raises(ValueError, match="noise"):
        openings.begin(case.head, case.hidden, case.upper, case.goal, case.adjustments, case.first)
