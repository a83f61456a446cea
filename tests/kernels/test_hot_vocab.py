"""Hot vocabularies: the size that pays, and the paper's mixture draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lexshard.kernels.hot_vocab import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    fit_cost,
    interpolate,
    mixture_draw,
    rising,
    target_distribution,
)

settings.register_profile("hot_vocab", deadline=None)
settings.load_profile("hot_vocab")

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]


# -- the cost model ---------------------------------------------------------------------------


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
    smooth = rising(curve.skip_rate)
    assert np.allclose(interpolate(curve, curve.sizes), smooth, atol=1e-12)
    assert between.min() >= smooth[0] - 1e-12
    assert between.max() <= smooth[-1] + 1e-12


def test_interpolation_equals_scipys_monotone_cubic() -> None:
    from scipy.interpolate import PchipInterpolator

    sizes = np.array([0, 16, 64, 250, 1000, 4000])
    rates = np.array([0.0, 0.3, 0.5, 0.7, 0.85, 0.95])
    wanted = np.arange(4001)
    theirs = PchipInterpolator(np.log1p(sizes), rates)(np.log1p(wanted))
    assert np.allclose(interpolate(Curve(sizes, rates), wanted), theirs, atol=1e-12)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 9)), min_size=1, max_size=30))
def test_rising_is_the_weighted_projection(points: list[tuple[float, float]]) -> None:
    """Kuhn-Tucker: it rises, residuals sum to 0 over the whole, and no prefix pulls upwards."""
    values, weights = (np.array(column) for column in zip(*points, strict=True))
    fitted = rising(values, weights)
    assert (np.diff(fitted) >= 0).all()
    prefix = np.cumsum(weights * (values - fitted))
    assert (prefix >= -1e-9).all()
    assert abs(prefix[-1]) < 1e-9


@pytest.mark.parametrize("exponent", [0.2, 0.5, 0.9])
def test_the_first_order_condition_holds_at_an_inner_optimum(exponent: float) -> None:
    """a(H) = (V - H) a'(H), for a smooth curve with the minimum inside."""
    vocabulary = 100_000

    def rate(size: Floats) -> Floats:
        return 0.98 * (size / vocabulary) ** exponent

    sizes = np.arange(vocabulary + 1)
    costs = expected_cost(sizes, rate(sizes.astype(float)), Cost(1e-5, 1e-8), vocabulary)
    best = int(np.argmin(costs))
    assert 0 < best < vocabulary
    slope = exponent * 0.98 * best ** (exponent - 1) / vocabulary**exponent
    assert (vocabulary - best) * slope == pytest.approx(rate(np.array(float(best))), rel=2e-3)


def test_without_the_first_scan_the_size_is_wrong() -> None:
    """The paper's equation 10 counts H or V - H, never both: where the hot tokens hold little, its
    optimum really costs more."""
    vocabulary = 100_000
    every = np.arange(vocabulary + 1)
    harmonic = 0.5 * np.log1p(every) / np.log1p(vocabulary)
    theirs = harmonic * every + (1 - harmonic) * (vocabulary - every)
    costs = expected_cost(every, harmonic, Cost(0.0, 1.0), vocabulary)
    assert costs[np.argmin(theirs)] > 1.05 * costs.min()


def test_a_dozen_points_of_a_curve_find_its_optimum() -> None:
    """The size found from 12 sizes costs at most 1% more than the size found from all."""
    vocabulary = 50_000
    every = np.arange(vocabulary + 1)
    harmonic = np.log1p(every) / np.log1p(vocabulary)  # Zipf's law
    twelve = np.unique(np.geomspace(8, vocabulary, 12).round().astype(np.int64))
    curve = Curve(twelve, harmonic[twelve])
    costs = expected_cost(every, harmonic, Cost(0.0, 1.0), vocabulary)
    assert costs[best_size(curve, Cost(0.0, 1.0), vocabulary)] <= 1.01 * costs.min()


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
    with pytest.raises(ValueError, match="two different"):
        fit_cost(np.zeros(2), np.array([5.0, 5.0]), np.array([1.0, 2.0]))


# -- the mixture ------------------------------------------------------------------------------

DRAWS = 10**6
CONTROLS = {
    "plain": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


def zipf_row(size: int = 500, seed: int = 0) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    ranks = random.permutation(size)
    noise = 0.3 * random.standard_normal(size)
    return (-1.2 * np.log(1.0 + ranks) + noise).astype(np.float32)


def hot_half(logits: npt.NDArray[np.float32], count: int, seed: int) -> npt.NDArray[np.int32]:
    """Mostly likely tokens, some unlikely ones, and not the best: both sides are drawn."""
    random = np.random.default_rng(seed)
    likely = np.argsort(-logits)[1 : 2 * count : 2]
    others = random.choice(len(logits), count // 4, replace=False)
    return np.unique(np.concatenate([likely, others])).astype(np.int32)


def total_variation(tokens: npt.NDArray[np.int64], distribution: Floats) -> float:
    counts = np.bincount(tokens, minlength=len(distribution))
    return float(0.5 * np.abs(counts / len(tokens) - distribution).sum())


def noise_floor(distribution: Floats, draws: int, false_alarm: float) -> float:
    """What the total variation of ``draws`` true draws exceeds with at most this probability.

    Its mean is at most half the sum of the standard deviations; one draw moves it by at most
    1 / draws (McDiarmid).
    """
    mean = 0.5 * np.sqrt(distribution * (1 - distribution) / draws).sum()
    return float(mean + np.sqrt(np.log(1 / false_alarm) / (2 * draws)))


@pytest.mark.parametrize("hot", [40, 400])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", CONTROLS)
def test_the_mixture_draws_the_exact_distribution(name: str, temperature: float, hot: int) -> None:
    """Total variation over 10**6 draws at the noise floor; false alarms: 10**-9 per case."""
    logits = zipf_row()
    controls = {"inverse_temperature": 1 / temperature, **CONTROLS[name]}
    hot_ids = (
        hot_half(logits, hot, 1)
        if hot < 100
        else np.sort(np.argsort(-logits)[:hot]).astype(np.int32)
    )
    uniforms = np.random.default_rng(hot).random((DRAWS, 2))
    distribution = target_distribution(logits, **controls)
    tokens = mixture_draw(logits, hot_ids, uniforms, **controls)
    assert total_variation(tokens, distribution) < noise_floor(distribution, DRAWS, 1e-9)


def test_a_hot_mass_from_before_the_filters_is_wrong() -> None:
    """The paper's equation 7 takes alpha from the whole softmax: then the draw is biased, by the
    difference of the two hot masses, far above the noise floor."""
    logits = zipf_row()
    controls = {"inverse_temperature": 1 / 0.6, "top_k": 50}
    hot_ids = np.sort(np.argsort(-logits)[:10]).astype(np.int32)
    distribution = target_distribution(logits, **controls)
    unfiltered = target_distribution(logits, inverse_temperature=1.0)
    alpha, wrong = distribution[hot_ids].sum(), unfiltered[hot_ids].sum()
    uniforms = np.random.default_rng(0).random((DRAWS, 2))
    # The same draw, accepting with the wrong mass: u < wrong becomes u < alpha.
    first = uniforms[:, 0]
    uniforms[:, 0] = np.where(
        first < wrong, first / wrong * alpha, alpha + (first - wrong) / (1 - wrong) * (1 - alpha)
    )
    tokens = mixture_draw(logits, hot_ids, uniforms, **controls)
    floor = noise_floor(distribution, DRAWS, 1e-9)
    assert abs(alpha - wrong) > 20 * floor
    assert total_variation(tokens, distribution) == pytest.approx(abs(alpha - wrong), abs=floor)


LOGITS = st.one_of(
    st.lists(st.sampled_from([-np.inf, -3.0, 0.0, 0.5, 2.0]), min_size=1, max_size=40),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=200),
)


@settings(max_examples=300)
@given(
    LOGITS,
    st.data(),
    st.sampled_from([1.0, 0.25, 10.0]),
    st.integers(0, 20),
    st.sampled_from([1.0, 0.9, 0.5]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_numba_draws_what_the_reference_draws(
    values: list[float], data: st.DataObject, scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values, np.float32)
    places = st.sets(st.integers(0, len(logits) - 1))
    hot_ids = np.array(sorted(data.draw(places)), np.int32)
    uniforms = np.random.default_rng(len(values)).random((50, 2))
    arguments = {"inverse_temperature": scale, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    theirs = mixture_draw(logits, hot_ids, uniforms, **arguments, implementation="reference")
    ours = mixture_draw(logits, hot_ids, uniforms, **arguments)
    keep = target_distribution(logits, **arguments) > 0
    drawn = ours[ours >= 0]
    assert keep[drawn].all()
    hot_suffices = not keep[np.setdiff1d(np.arange(len(logits)), hot_ids)].any()
    assert hot_suffices or np.array_equal(ours, theirs)
    assert np.array_equal(ours < 0, theirs < 0)
    if hot_suffices:  # then alpha is 1 on both ways
        assert np.array_equal(ours, theirs)


def test_the_mixture_refuses_what_it_cannot_mean() -> None:
    logits, uniforms = np.zeros(4, np.float32), np.zeros((1, 2))
    with pytest.raises(ValueError, match="above 0"):
        mixture_draw(logits, np.array([1], np.int32), uniforms, inverse_temperature=0.0)
    for ids in ([1, 1], [2, 1], [4], [-1]):
        with pytest.raises(ValueError, match="sorted, distinct"):
            mixture_draw(logits, np.array(ids, np.int32), uniforms, inverse_temperature=1.0)
