"""Truncation keeps the same set in linear time as a plain sort does, to the last tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.exponential.double_precision import exponential, exponential_array
from lexshard.kernels.logprobs.reference import log_normalizer
from lexshard.kernels.truncate import best_ids, reference, truncate

LOGITS = st.one_of(
    st.lists(st.sampled_from([-np.inf, np.inf, -3.0, -0.0, 0.0, 0.5, 0.5000001, 2.0]), min_size=1),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=300),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
)


@settings(max_examples=400)
@given(
    LOGITS,
    st.sampled_from([1.0, 0.25, 10.0, float(np.float32(1 / 0.7))]),
    st.integers(0, 40),
    st.one_of(st.just(1.0), st.floats(1e-6, 1.0), st.sampled_from([0.25, 0.5, 0.75])),
    st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
)
def test_cpu_keeps_the_reference_set(
    values: list[float], scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values, np.float32)
    arguments = {"inverse_temperature": scale, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    keep = truncate(logits, **arguments)
    log_min_p = math.log(min_p) if min_p else -math.inf
    assert np.array_equal(keep, reference.truncate(logits, scale, top_k, top_p, log_min_p))
    assert keep.any() == (logits > -np.inf).any()
    if top_k:
        assert keep.sum() <= top_k


@pytest.mark.parametrize("size", [16_384, 262_144])
@pytest.mark.parametrize("top_p", [0.1, 0.95, 0.999999])
def test_large_vocabularies_agree(size: int, top_p: float) -> None:
    random = np.random.default_rng(size)
    logits = (3 * random.standard_normal(size)).astype(np.float32).round(3)
    keep = truncate(logits, inverse_temperature=1.25, top_p=top_p)
    assert np.array_equal(keep, reference.truncate(logits, 1.25, 0, top_p, -math.inf))
    shares = np.exp(1.25 * logits.astype(np.float64))
    shares /= shares.sum()
    assert shares[keep].sum() >= top_p - 1e-6
    least = np.flatnonzero(keep)[np.argmin(logits[keep])]
    assert shares[keep].sum() - shares[least] < top_p + 1e-6


def test_ties_keep_the_lower_id() -> None:
    logits = np.array([1, 2, 1, 2, 1], np.float32)
    assert truncate(logits, inverse_temperature=1.0, top_k=3).tolist() == [1, 1, 0, 1, 0]
    even = np.zeros(4, np.float32)
    assert truncate(even, inverse_temperature=1.0, top_p=0.5).tolist() == [1, 1, 0, 0]
    assert truncate(even, inverse_temperature=1.0, top_p=0.5000001).tolist() == [1, 1, 1, 0]


def test_the_order_is_min_p_then_top_k_then_top_p() -> None:
    """After min-p and top-k the mass is that of the survivors alone."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert truncate(logits, inverse_temperature=1.0, top_p=0.6).tolist() == [1, 1, 0, 0]
    assert truncate(logits, inverse_temperature=1.0, top_p=0.57, top_k=2).tolist() == [1, 0, 0, 0]
    assert truncate(logits, inverse_temperature=1.0, top_p=0.57, min_p=0.7).tolist() == [1, 0, 0, 0]
    assert truncate(logits, inverse_temperature=1.0, min_p=0.45).tolist() == [1, 1, 1, 0]


@given(LOGITS, st.integers(0, 30))
def test_best_ids_are_in_order(values: list[float], count: int) -> None:
    logits = np.array(values, np.float32)
    assert np.array_equal(best_ids(logits, count), reference.best_ids(logits, count))


@given(st.lists(st.floats(-800, 0), min_size=1))
def test_the_exponential_is_the_same_everywhere_and_right(values: list[float]) -> None:
    x = np.array(values)
    got = exponential_array(x)
    assert got.tolist() == [exponential(value) for value in values]
    right = np.where(x > -700, np.exp(x), 0.0)
    assert np.allclose(got, right, rtol=4e-16 * 4, atol=0)


@given(st.lists(st.floats(-60, 60, width=32), min_size=1))
def test_the_log_normalizer_is_right(values: list[float]) -> None:
    logits = np.array(values, np.float32)
    got = log_normalizer(logits)
    assert math.isclose(got, np.logaddexp.reduce(logits.astype(np.float64)), abs_tol=1e-12)
