"""Hot vocabularies: the size that pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lexshard.kernels.hot_vocab import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    fit_cost,
    interpolate,
)


def curves() -> st.SearchStrategy[Curve]:
    """Skip rates at rising sizes; now and then they fall a little, as measured ones do."""
    return st.lists(
        st.tuples(st.integers(0, 3000), st.floats(0, 1)),
        min_size=1,
        max_size=12,
        unique_by=lambda p: p[0],
    ).map(
        lambda points: Curve(
            np.array(sorted(size for size, _ in points), np.int64),
            np.array([rate for _, rate in sorted(points)]),
        )
    )


@given(curves(), st.floats(0, 1e-4), st.floats(1e-10, 1e-6))
def test_the_best_size_is_the_best_of_all_sizes(curve: Curve, fixed: float, each: float) -> None:
    vocabulary = 3000
    best = best_size(curve, Cost(fixed, each), vocabulary)
    rates = interpolate(curve, np.arange(vocabulary + 1)).tolist()
    brute = [
        fixed + each * (size + (1 - rate) * (vocabulary - size)) for size, rate in enumerate(rates)
    ]
    assert brute[best] <= min(brute) * (1 + 1e-12)


@given(curves())
def test_interpolation_is_monotone_and_meets_monotone_points(curve: Curve) -> None:
    between = interpolate(curve, np.arange(3001))
    assert (np.diff(between) >= -1e-12).all()
    smooth = np.maximum.accumulate(curve.skip_rate)
    assert np.allclose(interpolate(curve, curve.sizes), smooth, atol=1e-12)
    assert between.min() >= smooth[0] - 1e-12
    assert between.max() <= smooth[-1] + 1e-12


def test_without_the_first_scan_the_size_is_wrong() -> None:
    """The paper's equation 10 counts H or V - H, never both: where the hot tokens hold little, its
    optimum really costs more."""
    vocabulary = 100_000
    every = np.arange(vocabulary + 1)
    harmonic = 0.5 * np.log1p(every) / np.log1p(vocabulary)
    theirs = harmonic * every + (1 - harmonic) * (vocabulary - every)
    costs = expected_cost(every, harmonic, Cost(0.0, 1.0), vocabulary)
    assert costs[np.argmin(theirs)] > 1.05 * costs.min()


def test_off_and_everything_are_sizes_too() -> None:
    flat = Curve(np.array([0, 1000]), np.array([0.999, 0.999]))
    assert best_size(flat, Cost(1e-6, 1e-9), 1000) == 0  # nothing is gained: off
    useless = Curve(np.array([0, 1000]), np.array([0.0, 0.0]))
    costs = expected_cost(useless.sizes, useless.skip_rate, Cost(0.0, 1.0), 1000)
    assert costs.tolist() == [1000.0, 1000.0]
    assert best_size(useless, Cost(0.0, 1.0), 1000) == 0
    steep = Curve(np.array([0, 5]), np.array([0.0, 1.0]))
    assert best_size(steep, Cost(0.0, 1.0), 5) > 0


@given(
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
    st.floats(0, 1e-3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**5)), min_size=4, max_size=9),
)
def test_costs_are_recovered(
    fixed: float, each: float, two_goes: float, points: list[tuple[int, int]]
) -> None:
    sizes, visited = (np.array(column, np.int64) for column in zip(*points, strict=True))
    tokens = sizes + visited
    assume(tokens.min() < tokens.max())
    seconds = fixed + each * tokens + two_goes * (sizes > 0)
    cost = fit_cost(sizes, visited, seconds)
    fitted = cost.fixed + cost.per_token * tokens + cost.two_goes * (sizes > 0)
    assert min(cost) >= 0
    assert np.allclose(fitted, seconds, atol=1e-9)


def test_costs_are_never_negative() -> None:
    none, x = np.zeros(3), np.array([0.0, 10.0, 20.0])
    falling = fit_cost(none, x, np.array([3.0, 2.0, 1.0]))
    assert falling == pytest.approx((2.0, 0.0, 0.0))
    steep = fit_cost(none, x, np.array([0.0, 1.0, 30.0]))
    assert steep == pytest.approx((0.0, 610 / 500, 0.0))
    cheaper = fit_cost(np.array([0.0, 10.0, 20.0]), none, np.array([9.0, 1.0, 1.0]))
    assert min(cheaper) >= 0
    same = fit_cost(np.zeros(2), np.array([5.0, 5.0]), np.array([1.0, 2.0]))
    assert same.fixed + 5 * same.per_token == pytest.approx(1.5)
