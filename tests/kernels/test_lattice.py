"""Sparse quantised distributions: what is kept, and how it is rounded and drawn from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.actors.edge.lattice import Lattice
from lexshard.kernels.lattice import draw, quantise, sparsify

FALSE_ALARM = 1e-4


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=60),
    st.integers(1, 2_000),
)
def test_counts_sum_to_the_resolution_and_are_the_nearest(
    weights: list[float], resolution: int
) -> None:
    """No count is off by one or more, and none that was rounded down has a larger remainder than
    one that was rounded up."""
    shares = np.array(weights) / np.sum(weights)
    counts = quantise(shares, resolution)
    assert counts.sum() == resolution
    assert counts.min() >= 0
    off = counts - shares * resolution
    assert np.abs(off).max() < 1
    up, down = off[off > 1e-9], off[off < -1e-9]
    if len(up) and len(down):  # what was rounded up by u had a remainder of 1 - u
        assert 1 - up.max() >= -down.min() - 1e-9


@pytest.mark.parametrize("inverse_temperature", [0.5, 1.0, 2.0])
def test_what_is_kept_is_the_likeliest_renormalised(inverse_temperature: float) -> None:
    random = np.random.default_rng(5)
    ids = np.sort(random.choice(90_000, 5_000, replace=False)).astype(np.int32)
    logits = (3 * random.standard_normal(5_000)).astype(np.float32)
    logits[::7] = -np.inf
    scaled = logits.astype(np.float64) * inverse_temperature
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    for most, threshold in ((32, 0.0), (0, 1e-3), (5, 1e-3), (0, 0.0), (1, 0.0), (0, 1.0)):
        kept = sparsify(
            ids, logits, inverse_temperature=inverse_temperature, most=most, threshold=threshold
        )
        wanted = np.flatnonzero((shares >= threshold) & (logits > -np.inf))
        wanted = wanted if len(wanted) else np.array([shares.argmax()])
        if most:
            wanted = np.sort(wanted[np.argsort(-shares[wanted], kind="stable")][:most])
        assert kept.ids.tolist() == ids[wanted].tolist()
        assert np.allclose(kept.probabilities, shares[wanted] / shares[wanted].sum(), rtol=1e-12)
        assert kept.dropped == pytest.approx(1 - shares[wanted].sum(), abs=1e-12)
    with pytest.raises(ValueError, match="excluded"):
        sparsify(ids, np.full(5_000, -np.inf, np.float32), inverse_temperature=1.0)


def test_guesses_are_drawn_from_the_quantised_distribution() -> None:
    """Chi-square over 20,000 keys; a count of 0 is never drawn."""
    lattice = Lattice(np.array([3, 70, 71, 9_000], np.int32), np.array([60, 0, 37, 3], np.int64))
    drawn = [draw(lattice.likely, lattice.logits, key, 5) for key in range(20_000)]
    found = [drawn.count(token_id) for token_id in lattice.ids.tolist()]
    assert found[1] == 0
    some = lattice.counts > 0
    expected = 20_000 * lattice.counts[some] / lattice.counts.sum()
    assert stats.chisquare(np.array(found)[some], expected).pvalue > FALSE_ALARM
