"""Blocks as vectors say what loops say: no token that may reach a score is left out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from lexshard.kernels.block_maxima import held_maxima
from lexshard.kernels.block_vectors import (
    exclude,
    least_logit,
    reaching,
    write_block_bounds,
)
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.masks import ids_of, mask_words
from lexshard.kernels.noise.cpu import block_draw, block_minimum, fresh_ceiling, token_noise
from lexshard.kernels.search.blocks import slack_factors, upper_bounds

SEEDS = st.integers(0, 2**32)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


@njit
def _exclude(values, word):  # type: ignore[no-untyped-def]
    exclude(values, 0, word)


@njit
def _bounds(values, slacks, hidden_slack, first):  # type: ignore[no-untyped-def]
    factors = slack_factors(hidden_slack)
    ours, expected = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    write_block_bounds(values, slacks, factors, first, ours)
    upper_bounds(values, slacks, factors, first, expected)
    return ours, expected


def _places(word: int) -> list[int]:
    return [place for place in range(BLOCK) if int(word) >> place & 1]


@given(SEEDS, st.integers(1, BLOCK), FINITE)
def test_tokens_that_reach_a_logit(seed: int, size: int, least: float) -> None:
    random = np.random.default_rng(seed)
    values = (least + 3 * random.standard_normal(size)).astype(np.float32)
    values[random.random(size) < 0.2] = np.float32(least)
    values[random.random(size) < 0.2] = -np.inf
    found = reaching(values, np.float32(least))
    assert _places(found) == np.flatnonzero(values >= np.float32(least)).tolist()


@given(
    FINITE | st.just(np.inf),
    st.floats(-50, 1e6) | st.just(np.inf),
    st.floats(2.0**-100, 2.0**100, width=32),
    st.integers(-3, 3),
)
def test_no_logit_below_the_least_reaches_the_score(
    logit: float, noise: float, scale: float, steps: int
) -> None:
    """Also where the score is what the logit has, give or take some steps of fp64."""
    score = np.float64(logit) * scale + noise
    for _ in range(abs(steps)):
        score = np.nextafter(score, np.sign(steps) * np.inf)
    if np.float64(logit) * scale + noise >= score:
        assert np.float32(logit) >= least_logit(score, noise, scale)


@given(SEEDS, st.integers(0, 3))
def test_bounds_of_a_block_are_those_of_its_tokens(seed: int, block: int) -> None:
    random = np.random.default_rng(seed)
    values = (9 * random.standard_normal(4 * BLOCK)).astype(np.float32)
    slacks = random.random((2, 4 * BLOCK)).astype(np.float32)
    ours, expected = _bounds(values, slacks, random.random(3), block * BLOCK)
    assert np.array_equal(ours, expected)


@given(SEEDS, st.integers(1, 3 * BLOCK), st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]))
def test_what_a_mask_leaves_of_blocks(seed: int, size: int, share: float) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal(size).astype(np.float32)
    words = mask_words(np.flatnonzero(random.random(size) < share), size)
    left = np.full(len(words) * BLOCK, -np.inf, np.float32)
    held = ids_of(words, size)
    left[held] = values[held]
    maxima = np.empty(len(words), np.float32)
    held_maxima(values, words, maxima)
    assert np.array_equal(maxima, left.reshape(-1, BLOCK).max(axis=1))
    if size >= BLOCK:
        _exclude(values, words[0])
        assert np.array_equal(values[:BLOCK], left[:BLOCK])


@given(SEEDS, st.integers(0, 2**40), st.integers(0, 2**18))
def test_a_ceiling_without_logarithms(key: int, position: int, token: int) -> None:
    key_, position_ = np.uint64(key), np.uint64(position)
    uniform, winner = block_draw(key_, position_, np.uint64(token // BLOCK))
    smallest = block_minimum(uniform)
    ceiling = fresh_ceiling(key_, position_, token, smallest, winner)
    assert ceiling >= token_noise(key_, position_, token, smallest, winner)
