"""Hot vocabularies: the size that pays, the paper's mixture draw, a set that follows its use."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.hot_vocabulary import (
    HotFile,
    HotVocabulary,
    read_hot_file,
    synthetic_decide,
    tokenizer_hash,
    write_hot_file,
)
from actors.hot_vocabulary.file import About, MixPart
from actors.hot_vocabulary.report import write_report
from actors.hot_vocabulary.traces import read_traces
from kernels.hot_vocab import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    fit_cost,
    interpolate,
    mixture_draw,
    rising,
    skip_rate,
    target_distribution,
)

settings.register_profile("hot_vocab", deadline=None)
settings.load_profile("hot_vocab")

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

DEMO = Path(__file__).resolve().parent.parent / "models" / "lexshard-demo"


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


# -- at run time ------------------------------------------------------------------------------

VOCABULARY = 16_384
COST = Cost(2e-6, 2e-9)
SIZES = np.array([0, *np.geomspace(64, VOCABULARY, 11).round()], np.int64)


class World:
    """Rows that visit the whole tail when their token is not hot, as the paper's mixture does.

    The tokens' frequencies follow Zipf's law; ``shift`` says how many tokens nobody asks for come
    before the most frequent one in the hot vocabulary's own order (V: nothing is ever hit).
    """

    def __init__(self, seed: int = 0, cost: Cost = COST) -> None:
        self._random = np.random.default_rng(seed)
        self._cost = cost
        self.ids = self._random.permutation(VOCABULARY).astype(np.int32)

    def hot_vocabulary(self) -> HotVocabulary:
        curve = Curve(SIZES, self.hit_rate(0)[SIZES])
        return HotVocabulary(self.ids, VOCABULARY, curve, self._cost)

    def hit_rate(self, shift: int) -> Floats:
        """By the number of hot tokens, 0 to V."""
        weights = 1.0 / (1.0 + np.arange(VOCABULARY)) ** 1.2
        moved = np.concatenate([np.zeros(shift), weights])[:VOCABULARY]
        return np.concatenate([[0.0], np.cumsum(moved) / weights.sum()])

    def best_cost(self, shift: int) -> float:
        sizes = np.arange(VOCABULARY + 1)
        return float(expected_cost(sizes, self.hit_rate(shift), self._cost, VOCABULARY).min())

    def cost_of(self, size: int, shift: int) -> float:
        rate = self.hit_rate(shift)[[size]]
        return float(expected_cost(np.array([size]), rate, self._cost, VOCABULARY)[0])

    def run(self, hot: HotVocabulary, rows: int, shift: int, slowness: float = 1.0) -> None:
        for _ in range(rows // 8):
            missed = self._random.random(8) > self.hit_rate(shift)[hot.size]
            visited = int(missed.sum()) * (VOCABULARY - hot.size)
            seconds = 8 * self._cost.fixed + self._cost.per_token * (8 * hot.size + visited)
            seconds += 8 * self._cost.two_goes * (hot.size > 0)
            noise = self._random.uniform(0.9, 1.2) * (100 if self._random.random() < 0.01 else 1)
            hot.observe(visited, 8, slowness * seconds * noise)


def test_a_hot_vocabulary_follows_its_use_and_comes_back() -> None:
    """The domain moves to tokens that were rare: the set grows. It moves back: it shrinks. Within
    10,000 rows the size costs at most 15% more than the best of all sizes there."""
    world = World()
    hot = world.hot_vocabulary()
    at_first = hot.size
    assert 0 < at_first < 4000
    world.run(hot, 10_000, shift=0)
    assert world.cost_of(hot.size, 0) <= 1.15 * world.best_cost(0)
    world.run(hot, 10_000, shift=4000)
    assert hot.size > 4000
    assert world.cost_of(hot.size, 4000) <= 1.15 * world.best_cost(4000)
    world.run(hot, 60_000, shift=0)
    assert hot.size < 4000
    assert world.cost_of(hot.size, 0) <= 1.15 * world.best_cost(0)


def test_a_hot_vocabulary_switches_itself_off_where_it_does_not_pay() -> None:
    """Nothing is ever hit, and looking in two goes costs: off, but for a trial now and then.
    Familiar rows bring it back."""
    world = World(1, COST._replace(two_goes=5e-6))
    hot = world.hot_vocabulary()
    assert hot.size > 0
    strange = VOCABULARY
    world.run(hot, 20_000, shift=strange)
    off = 0
    for _ in range(100):
        world.run(hot, 256, shift=strange)
        off += hot.size == 0
        assert (hot.hot_ids is None) == (len(hot.ids) == 0) == (hot.size == 0)
    assert off > 80
    world.run(hot, 60_000, shift=0)
    assert world.cost_of(hot.size, 0) <= 1.15 * world.best_cost(0)


def test_a_size_that_pays_is_kept_while_nothing_changes() -> None:
    """Noise and interrupted steps move nothing: the size of the traces stays for 50,000 rows."""
    world = World(2)
    hot = world.hot_vocabulary()
    sizes = set()
    for _ in range(50):
        world.run(hot, 1000, shift=0)
        sizes.add(hot.size)
    costs = [world.cost_of(size, 0) for size in sizes]
    assert max(costs) <= 1.1 * world.best_cost(0)


def test_the_live_cost_follows_the_machine() -> None:
    world = World(3)
    hot = world.hot_vocabulary()
    world.run(hot, 20_000, shift=0, slowness=3.0)
    size = np.array([hot.size])
    predicted = expected_cost(size, interpolate(hot.curve, size), hot.cost, VOCABULARY)
    assert predicted[0] == pytest.approx(3.15 * world.cost_of(hot.size, 0), rel=0.25)


def test_block_maxima_that_leave_little_switch_hot_tokens_off() -> None:
    """Where 300 tokens are visited without any hot ones, none pays: honest, and not 64 either."""
    visited = np.maximum(300.0 - 0.5 * SIZES, 0.0)
    curve = Curve(SIZES, skip_rate(SIZES, visited, VOCABULARY))
    assert HotVocabulary(World().ids, VOCABULARY, curve, COST).size == 0


def test_calibration_takes_the_cost_from_timings_and_stops_in_time() -> None:
    world = World(4)
    hot = world.hot_vocabulary()
    rates = world.hit_rate(0)
    clock = np.zeros(2)

    def decide(hot_ids: Ids) -> npt.NDArray[np.int64]:
        assert (np.diff(hot_ids) > 0).all()
        visited = (1 - rates[len(hot_ids)]) * (VOCABULARY - len(hot_ids))
        ends = time.perf_counter() + 4 * (50e-6 + 20e-9 * (len(hot_ids) + visited))
        while time.perf_counter() < ends:
            pass
        clock[0] += 1
        return np.full(4, round(visited))

    started = time.perf_counter()
    cost = hot.calibrate(decide, seconds=0.2)
    assert time.perf_counter() - started < 0.5
    assert clock[0] > 20
    assert cost.fixed + cost.two_goes == pytest.approx(50e-6, rel=0.5)
    assert cost.per_token == pytest.approx(20e-9, rel=0.5)
    assert hot.cost == cost


def test_the_real_decision_calibrates() -> None:
    """With the kernel that serves: a cost of every kind, in the time that was allowed."""
    world = World(6)
    hot = world.hot_vocabulary()
    decide = synthetic_decide(VOCABULARY)
    decide(hot.ids)  # compiled
    started = time.perf_counter()
    cost = hot.calibrate(decide, seconds=0.1)
    assert time.perf_counter() - started < 0.5
    assert min(cost) >= 0
    assert 0 < cost.fixed + cost.per_token * VOCABULARY < 1e-2


def test_observing_is_cheap() -> None:
    """It runs beside decisions of 100 microseconds a row: under 5 a row, the refits included."""
    world = World(5)
    hot = world.hot_vocabulary()
    quickest = np.inf
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(64):
            hot.observe(8 * 1000, 8, 2e-5)
        quickest = min(quickest, (time.perf_counter() - started) / 512)
    assert quickest < 5e-6


def test_hot_ids_must_be_ids() -> None:
    curve = Curve(SIZES, World().hit_rate(0)[SIZES])
    for ids in ([1, 1, 2], [-1, 2], [0, VOCABULARY]):
        with pytest.raises(ValueError, match="distinct ids"):
            HotVocabulary(np.array(ids, np.int32), VOCABULARY, curve, COST)


# -- the file ---------------------------------------------------------------------------------


def some_file(ids: Ids, shift: int = 0) -> HotFile:
    size = len(ids)
    sizes = np.minimum(SIZES[:9], size)
    visited = (1 - World().hit_rate(shift)[sizes]) * (size - sizes)
    about = About(
        model="some-model",
        vocabulary_size=size,
        tokenizer="0" * 64,
        traces=("talk.jsonl",),
        counted_tokens=1000,
        generated_tokens=0,
        positions=64,
        seed=0,
        sizes=tuple(sizes.tolist()),
        hit_rate=tuple(World().hit_rate(shift)[sizes].tolist()),
        mix=(MixPart("greedy", tuple(visited.tolist()), tuple((1e-9 * visited).tolist())),),
        cost=COST,
    )
    return HotFile(ids, about)


def test_a_file_comes_back_as_it_was_and_has_always_the_same_bytes(tmp_path: Path) -> None:
    written = some_file(World().ids)
    write_hot_file(tmp_path / "a.lexshard", written)
    write_hot_file(tmp_path / "b.lexshard", written)
    assert (tmp_path / "a.lexshard").read_bytes() == (tmp_path / "b.lexshard").read_bytes()
    read = read_hot_file(tmp_path / "a.lexshard", VOCABULARY, "0" * 64)
    assert read.about == written.about
    assert np.array_equal(read.ids, written.ids)
    assert read.cost == COST
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.lexshard", "b.lexshard"]


def test_files_that_do_not_fit_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "hot.lexshard"
    again = "lexshard hotset build"
    with pytest.raises(ValueError, match=f"no hot vocabulary at.*{again}"):
        read_hot_file(path)
    write_hot_file(path, some_file(World().ids))
    with pytest.raises(ValueError, match=f"16,384 tokens.*this model has 32,000.*{again}"):
        HotVocabulary.load(path, 32_000)
    with pytest.raises(ValueError, match=f"another tokenizer.*{again}"):
        HotVocabulary.load(path, VOCABULARY, "1" * 64)
    whole = path.read_bytes()
    changed = whole.replace(b"talk.jsonl", b"walk.jsonl")
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), changed, whole[:100], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"hot\.lexshard.*hotset build"):
            HotVocabulary.load(path, VOCABULARY)


def test_a_changed_file_is_read_again_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "hot.lexshard"
    write_hot_file(path, some_file(World(0).ids))
    hot = HotVocabulary.load(path, VOCABULARY)
    assert not hot.reload_if_changed()
    before = hot.ids
    write_hot_file(path, some_file(World(9).ids, shift=2000))
    assert hot.reload_if_changed()
    assert hot.size > 2000
    assert not np.array_equal(hot.ids[: len(before)], before)
    assert not hot.reload_if_changed()

    kept = hot.ids
    write_hot_file(path, some_file(np.arange(100, dtype=np.int32)))
    with pytest.raises(ValueError, match="100 tokens"):
        hot.reload_if_changed()
    assert not hot.reload_if_changed()  # said once; the old content stays
    assert np.array_equal(hot.ids, kept)
    path.unlink()
    assert not hot.reload_if_changed()


# -- traces and the command -------------------------------------------------------------------


def test_traces_are_read_in_every_form(tmp_path: Path, demo_tokenizer: object) -> None:
    lines = [
        {"token_ids": [5, 6, 7]},
        {"text": "Once upon a time"},
        {"prompt": "Once upon a time"},
        {"prompt": [8, 9]},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    plain = tmp_path / "story.txt"
    plain.write_text("Once upon a time\n\n\nThe end.\n")
    traces = read_traces([path, plain], demo_tokenizer, VOCABULARY)
    assert traces.sources == ("talk.jsonl", "story.txt")
    assert len(traces.texts) == 7
    assert traces.texts[0] == (5, 6, 7)
    assert traces.texts[1] == traces.texts[2] == traces.texts[5]
    assert traces.texts[3] == (8, 9)

    for bad, message in (
        ("{", "line 1 is not JSON"),
        ('{"question": "?"}', "line 1 has none of"),
        ('{"prompt": 3}', "neither text nor token ids"),
        ('{"messages": "Hi"}', "messages need"),
        ('{"token_ids": [16384]}', "another model"),
        ("", "no text in"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_traces([path], demo_tokenizer, VOCABULARY)
    with pytest.raises(ValueError, match="no tokenizer"):
        read_traces([plain], None, VOCABULARY)


def test_the_command_builds_shows_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: list[str]
) -> None:
    from serve_app.cli import main

    talk = tmp_path / "talk.jsonl"
    talk.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts[:12]))
    out, report = tmp_path / "hot.lexshard", tmp_path / "report.json"
    build = ["hotset", "build", str(DEMO), "--traces", str(talk), "--out", str(out)]
    few = ["--positions", "16", "--generate", "4", "--threads", "1"]
    assert main([*build, *few, "--report", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "optimum: H = " in printed

    hot = HotVocabulary.load(out, VOCABULARY, tokenizer_hash(DEMO))
    file = read_hot_file(out)
    assert sorted(file.ids.tolist()) == list(range(VOCABULARY))
    assert file.about.positions == 16
    assert file.about.generated_tokens > 0
    assert file.about.hit_rate[0] == 0.0
    assert file.about.hit_rate[-1] == pytest.approx(1.0)
    assert (np.diff(file.about.hit_rate) >= 0).all()
    assert file.visited[-1] == 0  # the whole vocabulary is hot: there is no tail
    assert hot.size in (0, *file.about.sizes, best_size(file.curve, COST, VOCABULARY))

    content = json.loads(report.read_text())
    assert content["about"] == json.loads(msgspec.json.encode(file.about))
    assert len(content["seconds_measured"]) == len(content["sizes"])
    page = tmp_path / "report.html"
    write_report(page, file)
    assert page.read_text().count("<svg") == 3

    assert main(["hotset", "show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed
    assert main(["hotset", "show", str(talk)]) == 2
    assert main([*build, "--report", "plot.png"]) == 2
    assert main(["hotset", "build", str(DEMO), "--traces", "nowhere.txt"]) == 2
    assert "no traces at nowhere.txt" in capsys.readouterr().err
