"""Certificates: given only where they hold, judged by the whole row in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.certify import (
    Evidence,
    Questions,
    coverage_certificate,
    epsilon_certificate,
    gather_evidence,
    known_log_mass,
    nucleus_certificate,
    outside_log_mass,
    outside_share,
    top_certificate,
)
from kernels.truncate import best_ids, truncate
from tests.support.paths import ROOT

settings.register_profile("certify", deadline=None, max_examples=200)
settings.load_profile("certify")

IMPLEMENTATIONS = ("cpu", "reference")
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

    def shares(self) -> tuple[float, float]:
        """The mass inside and outside, relative to their sum; NaN where that says nothing."""
        scaled = self.logits.astype(np.longdouble) * self.scale
        top = scaled.max(initial=-np.inf)
        if not np.isfinite(top):
            return math.nan, math.nan
        inside = np.exp(self.known.astype(np.longdouble) * self.scale - top).sum()
        outside = np.exp(self.outside.astype(np.longdouble) * self.scale - top).sum()
        return float(inside / (inside + outside)), float(outside / (inside + outside))


CASES = given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 200),
    count=st.integers(1, 20),
    flavour=st.sampled_from(FLAVOURS),
    looseness=st.sampled_from([0.0, 1e-6, 0.1, 3.0]),
)


@CASES
def test_certified_top_tokens_are_the_top_of_all(**arguments: object) -> None:
    case = Case(**arguments)  # type: ignore[arg-type]
    for k in (1, 2, 7, 50):
        certified = {
            top_certificate(case.known, k, case.largest, implementation=implementation)  # type: ignore[arg-type]
            for implementation in IMPLEMENTATIONS
        }
        assert len(certified) == 1
        if certified.pop():
            kept = case.logits[best_ids(case.logits, k)] > -np.inf
            own = case.ids[best_ids(case.known, k)]
            own = own[case.logits[own] > -np.inf]
            assert set(own) == set(best_ids(case.logits, k)[kept])


def test_equality_is_not_certified() -> None:
    known = np.array([3.0, 2.0, 1.0], np.float32)
    assert top_certificate(known, 2, math.nextafter(2.0, 0.0))
    assert not top_certificate(known, 2, 2.0)
    assert not top_certificate(known, 4, 0.5)
    assert top_certificate(known, 4, -math.inf)


@CASES
def test_no_share_outside_is_understated(**arguments: object) -> None:
    """Looseness of the bounds aside, the float64 oracle is met: also from above where it is 0."""
    case = Case(**arguments)  # type: ignore[arg-type]
    inside, outside = case.shares()
    bound = outside_share(case.known, case.scale, case.log_mass)
    assert 0 <= bound <= 1
    if math.isnan(inside):
        return
    assert bound >= outside
    for epsilon in (0.0, outside * (1 - 1e-12), 1e-6, 0.05, 0.5):
        for implementation in IMPLEMENTATIONS:
            if epsilon_certificate(
                case.known,
                case.scale,
                epsilon,
                case.log_mass,
                implementation=implementation,  # type: ignore[arg-type]
            ):
                assert outside <= epsilon
    for top_p in (0.05, 0.5, min(inside * (1 + 1e-12) + 1e-300, 1.0), 0.999, 1.0):
        if coverage_certificate(case.known, case.scale, top_p, case.log_mass):
            assert inside >= top_p


@CASES
def test_masses_are_rounded_outward_in_both_implementations(**arguments: object) -> None:
    case = Case(**arguments)  # type: ignore[arg-type]
    if not np.isfinite(case.known).any() or np.isinf(case.known).any():
        return
    exact = np.logaddexp.reduce(case.known.astype(np.longdouble) * case.scale)
    for implementation in IMPLEMENTATIONS:
        value = known_log_mass(case.known, case.scale, implementation=implementation)  # type: ignore[arg-type]
        assert value < exact
        assert math.isclose(value, exact, rel_tol=1e-11, abs_tol=1e-10)
    some = case.sizes > 0
    if not some.any() or not np.isfinite(case.upper[some]).any():
        return
    terms = np.log(case.sizes[some].astype(np.longdouble)) + case.upper[some] * np.longdouble(
        case.scale
    )
    exact = np.logaddexp.reduce(terms)
    for implementation in IMPLEMENTATIONS:
        value = outside_log_mass(
            case.upper,
            case.sizes,
            case.scale,
            implementation=implementation,  # type: ignore[arg-type]
        )
        assert value > exact or math.isinf(exact)
        assert math.isclose(value, exact, rel_tol=1e-11, abs_tol=1e-10)


@CASES
def test_a_certified_nucleus_is_what_truncation_keeps_of_the_whole_row(**arguments: object) -> None:
    case = Case(**arguments)  # type: ignore[arg-type]
    lower = np.logaddexp.reduce(case.outside.astype(np.float64) * case.scale, initial=-np.inf)
    lower = lower - 1e-9 if np.isfinite(lower) else -math.inf
    for top_p in (0.05, 0.5, 0.9, 0.999):
        for below in (-math.inf, lower):
            masses = (case.log_mass, below, case.largest)
            sizes = {
                nucleus_certificate(
                    case.known,
                    case.scale,
                    top_p,
                    *masses,
                    implementation=implementation,  # type: ignore[arg-type]
                )
                for implementation in IMPLEMENTATIONS
            }
            assert len(sizes) == 1
            size = sizes.pop()
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
    upper, sizes = np.array([3e38, np.inf, 5.0], np.float32), np.array([9, 1, 0])
    assert outside_log_mass(upper, sizes, 1.0) == math.inf
    assert outside_share(known, 1.0, math.inf) == 1.0
    assert not epsilon_certificate(known, 1.0, 0.9, math.inf)
    assert not coverage_certificate(known, 1.0, 0.1, math.inf)
    assert nucleus_certificate(known, 1.0, 0.5, math.inf, -math.inf, math.inf) == -1
    assert not epsilon_certificate(known, 1.0, 0.5, outside_log_mass(upper[:1], sizes[:1], 1.0))
    assert epsilon_certificate(known, 1.0, 1e-9, 2.9e38)


def test_nothing_known_certifies_nothing() -> None:
    nothing = np.array([-np.inf], np.float32)
    assert outside_share(nothing, 1.0, 3.0) == 1.0
    assert not epsilon_certificate(nothing, 1.0, 0.5, 3.0)
    assert nucleus_certificate(nothing, 1.0, 0.5, 3.0, 2.0, 1.0) == -1
    assert not top_certificate(nothing, 1, 3.0)


def test_questions_without_an_answer_are_refused() -> None:
    known = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="k >= 1"):
        top_certificate(known, 0, 1.0)
    with pytest.raises(ValueError, match="epsilon"):
        epsilon_certificate(known, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="top_p"):
        nucleus_certificate(known, 1.0, 1.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="top_p"):
        coverage_certificate(known, 1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="inverse temperature"):
        known_log_mass(known, 0.0)


def batch(seed: int, rows: int, known: int, count: int) -> tuple[np.ndarray, ...]:
    """Rows with bounds and sizes of what is not known, and what to certify them for."""
    random = np.random.default_rng(seed)
    logits = np.stack([_row(random, known, FLAVOURS[row % len(FLAVOURS)]) for row in range(rows)])
    upper = random.choice([-20.0, -6.0, 0.0, 1.0], (rows, 1)) + random.standard_normal(
        (rows, count)
    )
    upper[random.random((rows, count)) < 0.1] = -np.inf
    upper[random.random((rows, count)) < 0.002] = np.inf
    sizes = random.integers(0, 30, (rows, count)) * (random.random((rows, 1)) < 0.9)
    questions = (
        random.integers(1, known + 10, rows),
        random.choice([0.5, 1.0, float(np.float32(1.7))], rows),
        random.choice([0.0, 0.3, 0.9, 0.999], rows),
    )
    return logits, upper.astype(np.float32), sizes, *questions


def assert_equal_evidence(got: Evidence, want: Evidence) -> None:
    assert np.array_equal(np.asarray(got.threshold), want.threshold)
    assert np.array_equal(np.asarray(got.largest_outside), want.largest_outside)
    for ours, theirs in zip(got[2:4], want[2:4], strict=True):
        assert np.allclose(np.asarray(ours), theirs, rtol=1e-13, atol=1e-12)
    assert np.array_equal(np.asarray(got.nucleus_size), want.nucleus_size)


@pytest.mark.parametrize("seed", range(3))
def test_evidence_is_what_the_certificates_say_row_by_row(seed: int) -> None:
    known, upper, sizes, *asked = batch(seed, 60, 150, 40)
    evidence = gather_evidence(known, upper, sizes, Questions(*asked))
    reference = gather_evidence(known, upper, sizes, Questions(*asked), implementation="reference")
    assert_equal_evidence(evidence, reference)
    assert (evidence.nucleus_size > 0).sum() > 5
    for row, (k, scale, top_p) in enumerate(zip(*asked, strict=True)):
        outside = outside_log_mass(upper[row], sizes[row], scale)
        assert evidence.outside_log_mass[row] == outside
        assert evidence.known_log_mass[row] == known_log_mass(known[row], scale)
        largest = float(evidence.largest_outside[row])
        assert top_certificate(known[row], k, largest) == (
            largest == -np.inf or largest < evidence.threshold[row]
        )
        size = nucleus_certificate(known[row], scale, top_p, outside, -math.inf, largest)
        assert evidence.nucleus_size[row] == size


SCRIPT = """
import torch
from tests.kernels.test_certify import assert_equal_evidence, batch
from kernels.certify import Questions, gather_evidence
from kernels.certify import triton_kernel
for seed, shape in enumerate(((6, 150, 40), (2, 1100, 3), (1, 20, 1500), (1, 5, 0))):
    known, upper, sizes, *asked = batch(seed, *shape)
    want = gather_evidence(known, upper, sizes, Questions(*asked))
    got = triton_kernel.gather_evidence(
        torch.from_numpy(known), torch.from_numpy(upper), torch.from_numpy(sizes), Questions(*asked)
    )
    assert_equal_evidence(got, want)
"""


def test_triton_equals_cpu_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=ROOT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_equals_cpu_on_the_gpu() -> None:
    known, upper, sizes, *asked = batch(9, 64, 3000, 700)
    placed = [torch.from_numpy(each).cuda() for each in (known, upper, sizes)]
    got = gather_evidence(*placed, Questions(*asked))
    want = gather_evidence(known, upper, sizes, Questions(*asked))
    assert_equal_evidence(Evidence(*(part.cpu() for part in got)), want)
