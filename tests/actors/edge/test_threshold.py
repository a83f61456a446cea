"""Conformal control: the mass that is dropped on the average is bounded, whatever comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.edge.drafting import ConformalThreshold
from lexshard.kernels.lattice import sparsify

IDS = np.arange(40, dtype=np.int32)
FLAT = (-1e-3 * IDS).astype(np.float32)
PEAKED = np.where(IDS == 7, np.float32(12), np.float32(0))


def dropped_by(logits: np.ndarray, threshold: float) -> float:
    return sparsify(IDS, logits, inverse_temperature=1.0, threshold=threshold).dropped


@settings(deadline=None)
@given(
    st.floats(0.001, 0.9),
    st.floats(0.001, 50.0),
    st.floats(0.0, 1.0),
    st.lists(
        st.tuples(st.lists(st.sampled_from((0, 1, 2)), max_size=6), st.integers(0, 6)), max_size=60
    ),
    st.integers(0, 2**32),
)
def test_the_average_keeps_its_bound(
    alpha: float, eta: float, first: float, batches: list[tuple[list[int], int]], seed: int
) -> None:
    """Distributions that are flat, peaked or any; batches of which any number of tokens stand."""
    random = np.random.default_rng(seed)
    threshold = ConformalThreshold(alpha, eta, first)
    for kinds, stood in batches:
        for kind in kinds:
            anything = random.standard_normal(40).astype(np.float32)
            logits = (FLAT, PEAKED, anything)[kind]
            threshold.drafted(dropped_by(logits, threshold.value))
        threshold.heard(min(stood, len(kinds)) + 1)
        assert threshold.average <= threshold.bound + 1e-9


def test_the_worst_sequence_for_a_clamp_at_zero_keeps_it_too() -> None:
    """Flat distributions drop all but one token at any threshold above theirs: clamped at 0, half
    of all mass would be dropped for ever."""
    threshold = ConformalThreshold(0.1, 5.0, 0.0)
    for _ in range(2_000):
        threshold.drafted(dropped_by(FLAT, threshold.value))
        threshold.heard(1)
    assert threshold.average <= threshold.bound
    assert threshold.bound < 0.101
    clamped, state, total = 0.1, 0.0, 0.0
    for _ in range(2_000):
        dropped = dropped_by(FLAT, state)
        total += dropped
        state = max(0.0, state - 5.0 * (dropped - clamped))
    assert total / 2_000 > 0.4


def test_the_paper_s_constant_is_too_small_for_large_rates() -> None:
    alpha, eta, first = 0.1, 10.0, 1.0
    threshold = ConformalThreshold(alpha, eta, first)
    threshold.drafted(dropped_by(FLAT, threshold.value))
    threshold.heard(1)
    printed = alpha + (first + 1 + eta * alpha) / (eta * 1)
    assert threshold.average > 0.97 > printed
    assert threshold.average <= threshold.bound


def test_tokens_that_never_were_leave_no_trace() -> None:
    """Of a batch whose third token did not stand, the first three count; the next batch begins
    where a batch of three would have ended."""
    one, other = ConformalThreshold(0.1, 0.5, 0.2), ConformalThreshold(0.1, 0.5, 0.2)
    for dropped in (0.0, 0.3, 0.2, 0.9, 0.9):
        one.drafted(dropped)
    for dropped in (0.0, 0.3, 0.2):
        other.drafted(dropped)
    one.heard(3)
    other.heard(4)
    assert one.value == other.value == pytest.approx(0.2 - 0.5 * (0.5 - 3 * 0.1))
    assert one.average == other.average == pytest.approx(0.5 / 3)
