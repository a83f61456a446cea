"""The fast sum of exponentials keeps the error bound that decisions rest on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from lexshard.kernels.exponential import bounded_sum
from lexshard.kernels.exponential.bounded_sum import (
    STEP,
    factor_of,
    relative_error,
    shift_of,
    sum_of_exponentials,
)

pytestmark = pytest.mark.vectors


@njit
def _sum(logits, first, stop, shift, factor):  # type: ignore[no-untyped-def]
    return sum_of_exponentials(logits, first, stop, shift, factor)


def _polynomial(fractions: np.ndarray) -> np.ndarray:
    """As the kernel evaluates it, without fused operations."""
    value = np.full_like(fractions, bounded_sum.COEFFICIENTS[-1])
    for coefficient in bounded_sum.COEFFICIENTS[-2::-1]:
        value = value * fractions + np.float32(coefficient)
    return value


def test_the_polynomial_keeps_its_error() -> None:
    """A smooth function on a grid of 1e-6: between its points the error hardly changes."""
    grid = np.linspace(-0.5, 0.5, 1_000_001)
    for fractions in (grid, grid.astype(np.float32)):
        error = np.abs(_polynomial(fractions) / np.exp2(fractions.astype(np.float64)) - 1)
        assert error.max() < bounded_sum.POLYNOMIAL_ERROR


def test_one_exponential_is_as_good_as_the_polynomial_and_its_argument() -> None:
    """Every power of two, and arguments that lie on either side of where the integer changes."""
    whole = np.arange(-124, 125)[:, None] * math.log(2.0)
    rest = np.linspace(-0.5, 0.5, 5)[None] * math.log(2.0)
    for logit in (whole + rest).astype(np.float32).ravel():
        row = np.full(STEP, -np.inf, np.float32)
        row[5] = logit
        expected = math.exp(float(logit))
        found = float(_sum(row, 0, STEP, np.float32(0), factor_of(1.0)))
        allowed = relative_error(STEP, 0.0) + STEP * 2.0**-125 / expected
        assert abs(found / expected - 1) < allowed


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 64),
    spread=st.sampled_from([0.0, 0.02, 3.0, 40.0]),
    scale=st.sampled_from([2.0**-20, 0.3, 1.0, 50.0, 2.0**20]),
    middle=st.floats(-1e4, 1e4, width=32),
)
def test_a_sum_keeps_its_error(
    seed: int, steps: int, spread: float, scale: float, middle: float
) -> None:
    random = np.random.default_rng(seed)
    row = ((spread * random.standard_normal(steps * STEP) + middle) / scale).astype(np.float32)
    shift = shift_of(row.max(), factor_of(scale))
    exponents = row.astype(np.float64) * scale * bounded_sum.LOG2_E
    exact = np.exp2(exponents - float(shift)).sum()
    found = float(_sum(row, 0, row.size, shift, factor_of(scale)))
    assert abs(found / exact - 1) < relative_error(row.size, float(shift))


@pytest.mark.parametrize("logit", [np.inf, 1e30, 88.0])
def test_too_large_a_weight_is_seen(logit: float) -> None:
    row = np.zeros(STEP, np.float32)
    row[3] = logit
    assert _sum(row, 0, STEP, np.float32(0), factor_of(1.0)) > 2.0**125


def test_only_the_logits_asked_for_are_added() -> None:
    row = np.zeros(4 * STEP, np.float32)
    row[0], row[-1] = np.nan, np.nan
    found = _sum(row, STEP, 3 * STEP, np.float32(0), factor_of(1.0))
    assert found == pytest.approx(2 * STEP, rel=1e-5)
    assert _sum(row, STEP, STEP, np.float32(0), factor_of(1.0)) == 0
