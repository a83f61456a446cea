"""Certificates: given only where they hold, judged by the whole row in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.certify import (
    cpu,
    epsilon_certificate,
    known_log_mass,
    nucleus_certificate,
    reference,
)
from lexshard.kernels.certify.reference import LARGEST_VOCABULARY
from lexshard.kernels.truncate import best_ids, truncate
from tests.support.outside_masses import outside_log_mass

MODULES = (cpu, reference)
FLAVOURS = ("random", "flat", "ties", "peaked", "huge", "infinite")


def _row(random: np.random.Generator, size: int, flavour: str) -> np.ndarray:
    """Logits of a row; some tokens are excluded."""
    logits = 3 * random.standard_normal(size)
    if flavour == "flat":
        logits *= 1e-3
    elif flavour == "ties":
        logits = logits.round()
    elif flavour == "peaked":
        logits[0] += 30
    elif flavour == "huge":
        logits *= 1e35
    elif flavour == "infinite":
        logits[random.random(size) < 0.1] = np.inf
    logits[random.random(size) < 0.1] = -np.inf
    return logits.astype(np.float32)


class Case:
    """A row of which some clusters are known, with bounds of the others by ``looseness``."""

    def __init__(self, seed: int, size: int, count: int, flavour: str, looseness: float) -> None:
        random = np.random.default_rng(seed)
        self.scale = float(np.float32(random.choice([0.1, 0.7, 1.0, 2.5])))
        self.logits = _row(random, size, flavour)
        owner = random.integers(0, count, size)
        maxima = np.array([self.logits[owner == c].max(initial=-np.inf) for c in range(count)])
        # As an opening leaves it: the best clusters are known.
        opened = np.argsort(-maxima, kind="stable")[: random.integers(0, count + 1)]
        inside = np.isin(owner, opened)
        self.ids = np.flatnonzero(inside)
        self.known = self.logits[inside]
        left = np.setdiff1d(np.arange(count), opened)
        self.sizes = np.array([(owner == c).sum() for c in left], np.int64)
        self.upper = (maxima[left] + looseness).astype(np.float32)
        self.upper = np.maximum(self.upper, maxima[left].astype(np.float32))
        self.outside = self.logits[~inside]
        with np.errstate(over="ignore"):
            self.log_mass = outside_log_mass(self.upper, self.sizes, self.scale)
        self.largest = float(self.upper.max(initial=-np.inf, where=self.sizes > 0))

    def share_outside(self) -> float:
        """The mass outside, relative to all of it; NaN where that says nothing."""
        scaled = self.logits.astype(np.longdouble) * self.scale
        top = scaled.max(initial=-np.inf)
        if not np.isfinite(top):
            return math.nan
        inside = np.exp(self.known.astype(np.longdouble) * self.scale - top).sum()
        outside = np.exp(self.outside.astype(np.longdouble) * self.scale - top).sum()
        return float(outside / (inside + outside))


CASES = given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 200),
    count=st.integers(1, 20),
    flavour=st.sampled_from(FLAVOURS),
    looseness=st.sampled_from([0.0, 1e-6, 0.1, 3.0]),
)


@settings(max_examples=200)
@CASES
def test_no_share_outside_is_understated(**arguments: object) -> None:
    """An epsilon is certified only where no more is outside; 0 only where nothing is."""
    case = Case(**arguments)  # type: ignore[arg-type]
    outside = case.share_outside()
    if math.isnan(outside):
        return
    for epsilon in (0.0, outside * (1 - 1e-12), 1e-6, 0.05, 0.5):
        if epsilon_certificate(case.known, case.scale, epsilon, case.log_mass):
            assert outside <= epsilon


@settings(max_examples=200)
@CASES
def test_masses_are_rounded_outward_in_both_implementations(**arguments: object) -> None:
    case = Case(**arguments)  # type: ignore[arg-type]
    if not np.isfinite(case.known).any() or np.isinf(case.known).any():
        return
    exact = np.logaddexp.reduce(case.known.astype(np.longdouble) * case.scale)
    for module in MODULES:
        value = module.known_log_mass(case.known, case.scale)
        assert value < exact
        assert math.isclose(value, exact, rel_tol=1e-11, abs_tol=1e-10)


@settings(max_examples=200)
@CASES
def test_a_certified_nucleus_is_what_truncation_keeps_of_the_whole_row(**arguments: object) -> None:
    case = Case(**arguments)  # type: ignore[arg-type]
    lower = np.logaddexp.reduce(case.outside.astype(np.float64) * case.scale, initial=-np.inf)
    lower = lower - 1e-9 if np.isfinite(lower) else -math.inf
    for top_p in (0.05, 0.5, 0.9, 0.999):
        for below in (-math.inf, lower):
            masses = (case.log_mass, below, case.largest)
            size = nucleus_certificate(case.known, case.scale, top_p, *masses)
            asked = (case.known, case.scale, top_p, *masses, LARGEST_VOCABULARY)
            assert size == reference.nucleus_size(*asked)
            if size < 0:
                continue
            kept = truncate(case.logits, inverse_temperature=case.scale, top_p=top_p)
            own = np.sort(case.ids[best_ids(case.known, size)])
            assert np.array_equal(np.flatnonzero(kept), own)


def test_a_nucleus_is_certified_where_bounds_are_tight() -> None:
    """The certificate is not empty: nine in ten of these rows get one."""
    random = np.random.default_rng(0)
    certified = 0
    for _ in range(200):
        logits = (3 * random.standard_normal(5000)).astype(np.float32)
        order = best_ids(logits, 5000)
        known, outside = logits[order[:1000]], logits[order[1000:]]
        mass = float(np.logaddexp.reduce(outside.astype(np.float64)))
        size = nucleus_certificate(known, 1.0, 0.9, mass + 1e-6, mass - 1e-6, float(outside.max()))
        if size > 0:
            certified += 1
            kept = truncate(logits, inverse_temperature=1.0, top_p=0.9)
            assert np.array_equal(np.flatnonzero(kept), np.sort(order[:size]))
    assert certified >= 180


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95])
def test_a_nucleus_certified_from_half_the_mass_outside_is_noticed(top_p: float) -> None:
    """The tests above have teeth: understated masses certify wrong sets."""
    random = np.random.default_rng(1)
    wrong = 0
    for _ in range(100):
        logits = random.standard_normal(2000).astype(np.float32)
        order = best_ids(logits, 2000)
        known, outside = logits[order[:1500]], logits[order[1500:]]
        mass = float(np.logaddexp.reduce(outside.astype(np.float64))) + math.log(0.5)
        size = nucleus_certificate(known, 1.0, top_p, mass + 1e-9, mass - 1e-9, outside.max())
        kept = truncate(logits, inverse_temperature=1.0, top_p=top_p)
        wrong += size > 0 and size != kept.sum()
    assert wrong > 50


def test_masses_at_the_boundary_of_rounding_are_not_certified() -> None:
    """Two equal tokens and p = 1/2: the first alone holds the target exactly; any mass outside
    changes that, and half an integer unit outside may."""
    known = np.zeros(2, np.float32)
    assert nucleus_certificate(known, 1.0, 0.5, -math.inf, -math.inf, -math.inf) == 1
    tiny = (-60.0, -math.inf, -60.0)
    assert nucleus_certificate(known, 1.0, 0.5, *tiny) == -1
    assert nucleus_certificate(known, 1.0, 0.4999, *tiny) == 1


def test_nothing_overflows() -> None:
    known = np.array([3e38, 1.0], np.float32)
    assert not epsilon_certificate(known, 1.0, 0.9, math.inf)
    assert nucleus_certificate(known, 1.0, 0.5, math.inf, -math.inf, math.inf) == -1
    upper, sizes = np.array([3e38], np.float32), np.array([9])
    assert not epsilon_certificate(known, 1.0, 0.5, outside_log_mass(upper, sizes, 1.0))
    assert epsilon_certificate(known, 1.0, 1e-9, 2.9e38)


def test_nothing_known_certifies_nothing() -> None:
    nothing = np.array([-np.inf], np.float32)
    assert not epsilon_certificate(nothing, 1.0, 0.5, 3.0)
    assert nucleus_certificate(nothing, 1.0, 0.5, 3.0, 2.0, 1.0) == -1


def test_questions_without_an_answer_are_refused() -> None:
    known = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="epsilon"):
        epsilon_certificate(known, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="top_p"):
        nucleus_certificate(known, 1.0, 1.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="inverse temperature"):
        known_log_mass(known, 0.0)
