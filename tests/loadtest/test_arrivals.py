"""Arrivals have the distributions they are named after, and users the shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.loadtest.arrivals import ARRIVALS, arrival_seconds, users_at

COUNT = 20_000
# The seeds are fixed: a test that passes goes on passing. With another seed it would fail by
# chance once in a thousand.
FALSE_ALARM = 1e-3


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    gaps = np.diff(arrival_seconds("poisson", rate, COUNT, seed=1))
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    rate = 8.0
    gaps = np.diff(arrival_seconds("gamma", rate, COUNT, seed=2, burstiness=burstiness))
    expected = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, expected.cdf).pvalue > FALSE_ALARM
    assert expected.mean() == pytest.approx(1 / rate)
    assert expected.std() / expected.mean() == pytest.approx(burstiness**-0.5)


@settings(max_examples=40)
@given(st.sampled_from(ARRIVALS), st.integers(0, 2**32), st.integers(1, 50))
def test_a_seed_gives_the_same_arrivals_in_order_from_zero_on(
    kind: str, seed: int, count: int
) -> None:
    seconds = arrival_seconds(kind, 3.0, count, seed)
    assert len(seconds) == count
    assert seconds[0] == 0
    assert np.all(np.diff(seconds) >= 0)
    assert np.array_equal(seconds, arrival_seconds(kind, 3.0, count, seed))


@pytest.mark.parametrize(
    ("kind", "rate", "burstiness", "said"),
    [
        ("uniform", 1.0, 1.0, "choose one of poisson"),
        ("poisson", 0.0, 1.0, "rate is 0"),
        ("poisson", float("nan"), 1.0, "rate is nan"),
        ("gamma", 1.0, -1.0, "burstiness is -1"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(
    kind: str, rate: float, burstiness: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        arrival_seconds(kind, rate, 10, 0, burstiness)


def test_a_ramp_rises_to_all_users_and_a_spike_comes_in_every_period() -> None:
    assert {users_at("constant", seconds, 100, 60) for seconds in range(200)} == {100}
    ramp = [users_at("ramp", seconds, 100, 60) for seconds in range(120)]
    assert ramp == sorted(ramp)
    assert (ramp[0], ramp[30], ramp[60], ramp[-1]) == (1, 50, 100, 100)
    spikes = [users_at("spike", seconds, 100, 60) for seconds in range(120)]
    assert spikes.count(100) == 30
    assert spikes.count(20) == 90
    assert (spikes[0], spikes[30], spikes[59], spikes[90]) == (20, 100, 20, 100)
