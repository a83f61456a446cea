"""Sparse quantised distributions: what is kept, how it is rounded, and the bits that tell it."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.kernels.lattice import (
    Kept,
    Lattice,
    decode,
    draw,
    encode,
    lattice_bits,
    quantise,
    size_bits,
    sparsify,
)

FALSE_ALARM = 1e-4


def kept_of(weights: list[float]) -> Kept:
    shares = np.array(weights, np.float64)
    return Kept(np.arange(len(weights), dtype=np.int32), shares / shares.sum(), 0.0)


@st.composite
def lattices(draw_one: st.DrawFn) -> tuple[Lattice, int]:
    """A lattice and the size of its vocabulary: few tokens, most, all; piled up at either end."""
    size = draw_one(st.integers(1, 40))
    vocabulary_size = draw_one(st.sampled_from((size, size + 1, 2 * size + 1, 500, 262_144)))
    start = draw_one(st.integers(0, vocabulary_size - size))
    spread = draw_one(st.integers(0, vocabulary_size - size - start))
    steps = sorted(draw_one(st.lists(st.integers(0, spread), min_size=size, max_size=size)))
    ids = np.arange(start, start + size, dtype=np.int32) + np.array(steps, np.int32)
    counts = draw_one(
        st.lists(st.sampled_from((0, 0, 1, 2, 100, 5_000)), min_size=size, max_size=size)
    )
    counts[draw_one(st.integers(0, size - 1))] += 1
    return Lattice(ids, np.array(counts, np.int64)), vocabulary_size


@settings(max_examples=400, deadline=None)
@given(lattices())
def test_what_is_decoded_is_what_was_encoded(case: tuple[Lattice, int]) -> None:
    """By either implementation, within one bit of the formula."""
    lattice, vocabulary_size = case
    size, resolution = len(lattice.ids), int(lattice.counts.sum())
    number = encode(lattice, vocabulary_size)
    for implementation in ("cpu", "reference"):
        found = decode(number, vocabulary_size, size, resolution, implementation=implementation)
        assert found.ids.tolist() == lattice.ids.tolist()
        assert found.counts.tolist() == lattice.counts.tolist()
    bits = lattice_bits(vocabulary_size, size, resolution)
    assert number.bit_length() <= bits
    formula = math.log2(math.comb(vocabulary_size, size))
    formula += math.log2(math.comb(resolution + size - 1, size - 1))
    assert formula - 1e-6 <= bits < formula + 1 + 1e-6


def test_every_lattice_has_one_number_and_every_number_one_lattice() -> None:
    vocabulary_size, size, resolution = 6, 3, 4
    ways = math.comb(6, 3) * math.comb(6, 2)
    for number in range(ways):
        lattice = decode(number, vocabulary_size, size, resolution)
        assert encode(lattice, vocabulary_size) == number
        assert lattice.counts.sum() == resolution
    with pytest.raises(ValueError, match="no lattice"):
        decode(ways, vocabulary_size, size, resolution)


@pytest.mark.parametrize(
    ("ids", "counts"),
    [
        ((2, 1), (1, 1)),
        ((1, 1), (1, 1)),
        ((-1, 1), (1, 1)),
        ((1, 9), (1, 1)),
        ((), ()),
        ((1, 2), (1,)),
        ((1, 2), (3, -1)),
        ((1, 2), (0, 0)),
    ],
)
def test_what_is_no_lattice_is_refused(ids: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        encode(Lattice(np.array(ids, np.int32), np.array(counts, np.int64)), 9)


def test_the_paper_s_example_takes_498_bits() -> None:
    assert lattice_bits(50_257, 32, 100) + size_bits(50_257) == 498


@pytest.mark.slow
def test_a_million_distributions_come_back() -> None:
    """Random sizes, vocabularies and resolutions, few tokens to many."""
    random = np.random.default_rng(3)
    sizes = (50, 1_000, 50_257, 262_144)
    for _ in range(1_000_000):
        vocabulary_size = sizes[random.integers(4)]
        some = random.integers(0, vocabulary_size, min(int(random.geometric(0.15)), 60))
        ids = np.unique(some).astype(np.int32)
        resolution = (1, 10, 100, 1_000)[random.integers(4)]
        counts = np.bincount(random.integers(0, len(ids), resolution), minlength=len(ids))
        lattice = Lattice(ids, counts)
        found = decode(encode(lattice, vocabulary_size), vocabulary_size, len(ids), resolution)
        assert found.ids.tolist() == ids.tolist()
        assert found.counts.tolist() == counts.tolist()


def test_coding_32_of_262144_tokens_takes_milliseconds_at_most() -> None:
    """32 tokens there and back: 0.2 ms when it was measured; a busy machine has room."""
    random = np.random.default_rng(1)
    ids = np.sort(random.choice(262_144, 32, replace=False)).astype(np.int32)
    lattice = Lattice(ids, random.multinomial(100, np.full(32, 1 / 32)).astype(np.int64))
    number = encode(lattice, 262_144)
    decode(number, 262_144, 32, 100)  # compiled

    def took() -> float:
        started = time.perf_counter()
        decode(encode(lattice, 262_144), 262_144, 32, 100)
        return time.perf_counter() - started

    assert min(took() for _ in range(20)) < 0.005


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
    kept = kept_of(weights)
    counts = quantise(kept, resolution).counts
    assert counts.sum() == resolution
    assert counts.min() >= 0
    off = counts - kept.probabilities * resolution
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
    drawn = [draw(lattice, key, 5) for key in range(20_000)]
    found = [drawn.count(token_id) for token_id in lattice.ids.tolist()]
    assert found[1] == 0
    some = lattice.counts > 0
    expected = 20_000 * lattice.counts[some] / lattice.counts.sum()
    assert stats.chisquare(np.array(found)[some], expected).pvalue > FALSE_ALARM
