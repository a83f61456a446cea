"""Screens: every estimate within its bound of the canonical logit, whatever is aimed at it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels import pool
from lexshard.kernels.quantize import Int4Tier, Int8Tier, Tier, quantize
from lexshard.kernels.rows import canonical_logits
from lexshard.kernels.screen import Screened, cpu, reference, refine, screen, vnni
from lexshard.kernels.screen.types import HiddenBits
from tests.support.paths import ROOT
from tests.support.tier_cases import KINDS, SHAPES, weights

pytestmark = pytest.mark.vectors

DETERMINISTIC = ("int8", "int4")
# Every tier with the widths of hidden states that it can meet.
WIDTHS = [("int8", 8), *((kind, 16) for kind in KINDS)]


def _hidden(seed: int, rows: int, columns: int, outliers: bool) -> np.ndarray:
    """Hidden states [rows, columns] around a common mean; outliers are 100 times the others."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((rows, columns)) + random.standard_normal(columns)
    if outliers:
        hidden[:, random.integers(0, columns, 1 + columns // 100)] *= 100
    return hidden.astype(np.float32)


def _tier(weight: torch.Tensor, kind: str, direction: np.ndarray | None = None) -> Tier:
    return quantize(weight, kind, direction=direction)  # type: ignore[call-overload]


def _bound(screened: Screened) -> np.ndarray:
    """[N, V]"""
    return np.asarray(screened.hidden_slack @ screened.row_slack.astype(np.float64))


def _every_id(hidden: np.ndarray, tier: Tier) -> tuple[np.ndarray, np.ndarray]:
    rows, size = len(hidden), len(tier.scale)
    return np.tile(np.arange(size, dtype=np.int32), rows), np.arange(rows + 1) * size


def _refined(hidden: np.ndarray, tier: Int4Tier) -> Screened:
    """Both planes for all rows, as if it were a screen."""
    refined = refine(hidden, tier, *_every_id(hidden, tier))
    return refined._replace(estimate=refined.estimate.reshape(len(hidden), -1))


def _screens(hidden: np.ndarray, tier: Tier) -> list[Screened]:
    """In all the ways there are; the first is the most precise of one plane."""
    others = [_refined(hidden, tier)] if isinstance(tier, Int4Tier) else []
    if isinstance(tier, Int8Tier):
        others = [screen(hidden, tier, hidden_bits=8), screen(hidden, tier)]
    return [screen(hidden, tier, hidden_bits=16), *others]


def _violations(screened: Screened, hidden: np.ndarray, weight: torch.Tensor) -> int:
    """How many estimates are beyond their bound from the canonical logit or the exact product."""
    bound = _bound(screened)
    exact = hidden.astype(np.float64) @ weight.double().numpy().T
    canonical = canonical_logits(hidden, weight).astype(np.float64)
    beyond = np.abs(screened.estimate - canonical) > bound
    return int(beyond.sum() + (np.abs(screened.estimate - exact) > bound).sum())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 9),
    size=st.integers(1, 40),
    columns=st.integers(1, 300),
    bfloat16=st.booleans(),
    outliers=st.booleans(),
    centred=st.booleans(),
)
def test_no_estimate_is_beyond_its_bound(
    seed: int,
    kind: str,
    shape: str,
    rows: int,
    size: int,
    columns: int,
    bfloat16: bool,
    outliers: bool,
    centred: bool,
) -> None:
    weight = weights(seed, shape, size, columns)
    weight = weight.bfloat16() if bfloat16 else weight
    hidden = _hidden(seed, rows, columns, outliers)
    tier = _tier(weight, kind, hidden.mean(axis=0) if centred else None)
    for screened in _screens(hidden, tier):
        assert _violations(screened, hidden, weight) == 0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    width=st.sampled_from(WIDTHS),
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 13),
    size=st.integers(1, 40),
    columns=st.integers(1, 300),
    centred=st.booleans(),
)
def test_cpu_equals_reference(
    seed: int,
    width: tuple[str, HiddenBits],
    shape: str,
    rows: int,
    size: int,
    columns: int,
    centred: bool,
) -> None:
    """From equal integers equal bits; the integers themselves come from sums in other orders."""
    kind, bits = width
    hidden = _hidden(seed, rows, columns, False)
    tier = _tier(weights(seed, shape, size, columns), kind, hidden[0] if centred else None)
    quantized = cpu.quantize_hidden(hidden, tier, bits)
    assert np.array_equal(cpu.screen(quantized, tier), reference.screen(quantized, tier))
    plain = reference.quantize_hidden(hidden, tier, bits)
    whole = Screened(reference.screen(plain, tier), tier.row_slack, plain.hidden_slack)
    here = screen(hidden, tier, hidden_bits=bits)
    assert np.allclose(here.hidden_slack, whole.hidden_slack, rtol=1e-6, atol=0)
    assert np.all(np.abs(here.estimate - whole.estimate) <= 1e-6 * _bound(whole) + 1e-30)
    if isinstance(tier, Int4Tier):
        random = np.random.default_rng(seed)
        offsets = np.concatenate([[0], np.cumsum(random.integers(0, size + 1, rows))])
        ids = random.integers(0, size, offsets[-1]).astype(np.int32)
        want = reference.refine(quantized, tier, ids, offsets)
        assert np.array_equal(refine(hidden, tier, ids, offsets).estimate, want)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    size=st.integers(1, 300),
    columns=st.integers(1, 5),
    extreme=st.booleans(),
)
def test_eight_bits_give_the_same_with_and_without_their_instructions(
    seed: int, rows: int, size: int, columns: int, extreme: bool
) -> None:
    """The integers of the instructions are those of the 16-bit tiles, up to the largest bytes."""
    random = np.random.default_rng(seed)
    tier = quantize(weights(seed, "random", size, 64 * columns), "int8")
    bytes_of = [-128, 127] if extreme else range(-128, 128)
    tier.values[:] = random.choice(bytes_of, tier.values.shape)
    hidden = _hidden(seed, rows, 64 * columns, False)
    quantized = cpu.quantize_hidden(hidden, tier, 8)
    assert quantized.values.dtype == np.int8
    quantized.values[:] = random.choice(bytes_of, quantized.values.shape)
    here = cpu.screen(quantized, tier)
    portable = cpu.screen(quantized._replace(values=quantized.values.astype(np.int16)), tier)
    assert np.array_equal(here, portable)
    assert np.array_equal(here, reference.screen(quantized, tier))


def test_eight_bits_are_for_several_hidden_states_that_lose_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, hidden = weights(17, "random", 50, 256), _hidden(17, 6, 256, False)
    tier = _tier(weight, "int8")

    def bits(states: np.ndarray) -> int:
        return 8 * int(cpu.quantize_hidden(states, tier).values.dtype.itemsize)

    with monkeypatch.context() as patch:
        patch.setattr(vnni, "AVAILABLE", False)
        assert bits(hidden) == 16
        patch.setattr(vnni, "AVAILABLE", True)
        assert bits(hidden) == 8
        assert bits(hidden[:4]) == 16
        hidden[4] = 1.0
        hidden[4, 7] = 256.0  # a step is just above 2: all others are lost
        assert bits(hidden) == 16
        assert bits(np.delete(hidden, 4, axis=0)) == 8
    fine, coarse = (screen(hidden, tier, hidden_bits=width) for width in (16, 8))
    assert np.all(fine.hidden_slack[:, 1] < coarse.hidden_slack[:, 1])


def _aimed(weight: torch.Tensor, tier: Tier, fine: bool) -> np.ndarray:
    """Hidden states along the quantisation errors of the first 16 rows."""
    rows = np.arange(min(16, len(weight)))
    meaning = (
        tier.dequantise(rows, fine=fine) if isinstance(tier, Int4Tier) else tier.dequantise(rows)
    )
    error = weight.double().numpy()[rows] - meaning
    return (error * (30.0 / np.linalg.norm(error, axis=1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("columns", [100, 640, 1024])
@pytest.mark.parametrize(("kind", "fine"), [("int8", False), ("int4", False), ("int4", True)])
def test_bounds_hold_and_are_reached_by_hidden_states_aimed_at_them(
    kind: str, fine: bool, columns: int, bfloat16: bool
) -> None:
    """The same check with every bound halved must fail: it would notice a bound too small."""
    weight = weights(7, "random", 200, columns)
    weight = weight.bfloat16() if bfloat16 else weight
    tier = _tier(weight, kind)
    hidden = _aimed(weight, tier, fine)
    screened = _screens(hidden, tier)[int(fine)]
    assert _violations(screened, hidden, weight) == 0
    halved = screened._replace(hidden_slack=0.5 * screened.hidden_slack)
    assert _violations(halved, hidden, weight) >= len(hidden)


@pytest.mark.parametrize(("bits", "largest"), [(16, 32767.0), (8, 127.0)])
def test_the_rounding_of_hidden_states_is_bounded_too(bits: HiddenBits, largest: float) -> None:
    """Weights that are exact in int8 and a hidden state whose roundings all point one way: with
    that part of the bound halved it must fail."""
    columns = 1024
    random = np.random.default_rng(8)
    signs = random.choice([-1.0, 1.0], columns)
    weight = torch.from_numpy((127 * signs)[None].astype(np.float32))
    tier = _tier(weight, "int8")
    assert tier.row_slack[0, 0] == 0
    states = 0.49 * signs + random.integers(-40, 40, (5, columns))
    states[:, 0] = largest  # the step is 1
    hidden = states.astype(np.float32)
    screened = screen(hidden, tier, hidden_bits=bits)
    assert _violations(screened, hidden, weight) == 0
    halved = screened._replace(hidden_slack=0.5 * screened.hidden_slack)
    assert _violations(halved, hidden, weight) >= len(hidden)


@pytest.mark.parametrize(("kind", "bits"), WIDTHS)
@pytest.mark.parametrize("columns", [1024, 4096])
def test_the_largest_sums_fit_32_bits(kind: str, bits: HiddenBits, columns: int) -> None:
    """Constant rows have the largest integers, and a parallel hidden state the largest sum."""
    weight = torch.full((18, columns), 7.0)
    weight[1] = -7.0
    weight[2:] = weights(9, "random", 16, columns)
    hidden = np.full((6, columns), 5.0, np.float32)
    tier = _tier(weight, kind)
    quantized = cpu.quantize_hidden(hidden, tier, bits)
    screened = screen(hidden, tier, hidden_bits=bits)
    assert np.array_equal(screened.estimate, reference.screen(quantized, tier))
    assert _violations(screened, hidden, weight) == 0
    if isinstance(tier, Int4Tier):
        assert _violations(_refined(hidden, tier), hidden, weight) == 0


@pytest.mark.parametrize(("kind", "bits"), WIDTHS)
def test_estimates_of_one_width_do_not_depend_on_batch_or_threads(
    kind: str, bits: HiddenBits
) -> None:
    weight, hidden = weights(10, "random", 3001, 256), _hidden(10, 15, 256, False)
    tier = _tier(weight, kind)
    every = screen(hidden, tier, hidden_bits=bits).estimate
    for first, last in [*((row, row + 1) for row in range(15)), (0, 2), (3, 6), (1, 8), (4, 14)]:
        some = screen(hidden[first:last], tier, hidden_bits=bits).estimate
        assert np.array_equal(some, every[first:last])
    pool.set_threads(3)
    try:
        assert np.array_equal(screen(hidden, tier, hidden_bits=bits).estimate, every)
    finally:
        pool.set_threads(1)


def test_a_common_direction_tightens_the_bound() -> None:
    weight = weights(11, "random", 200, 256)
    random = np.random.default_rng(11)
    mean = 3 * random.standard_normal(256)
    hidden = (mean + random.standard_normal((8, 256))).astype(np.float32)
    plain = screen(hidden, _tier(weight, "int4"))
    centred = screen(hidden, _tier(weight, "int4", mean.astype(np.float32)))
    assert _bound(centred).mean() < 0.4 * _bound(plain).mean()
    assert _violations(centred, hidden, weight) == 0


@pytest.mark.parametrize(("kind", "bits"), WIDTHS)
def test_what_could_overflow_has_no_bound_and_finite_estimates(kind: str, bits: HiddenBits) -> None:
    weight = weights(12, "random", 5, 64) * 1e20
    hidden = _hidden(12, 6, 64, False)
    hidden[1] *= 1e20
    screened = screen(hidden, _tier(weight, kind), hidden_bits=bits)
    assert np.isfinite(screened.estimate).all()
    assert np.isinf(_bound(screened)[1]).all()
    assert np.isfinite(_bound(screened)[[0, 2, 3, 4, 5]]).all()


@pytest.mark.parametrize(("kind", "bits"), WIDTHS)
def test_zero_and_tiny_hidden_states(kind: str, bits: HiddenBits) -> None:
    weight = weights(13, "random", 20, 64)
    hidden = np.zeros((6, 64), np.float32)
    hidden[1] = 1e-45
    hidden[2, 5] = 1e-38
    screened = screen(hidden, _tier(weight, kind), hidden_bits=bits)
    assert _violations(screened, hidden, weight) == 0


def test_what_cannot_be_screened_is_refused() -> None:
    tier = _tier(weights(14, "random", 5, 64), "int8")
    with pytest.raises(ValueError, match="NaN or infinity"):
        screen(np.full((1, 64), np.nan, np.float32), tier)
    with pytest.raises(ValueError, match=r"hidden \[N, 64\] in fp32 expected"):
        screen(np.ones((1, 63), np.float32), tier)
    with pytest.raises(ValueError, match="only int8 tiers"):
        screen(
            np.ones((1, 64), np.float32), _tier(weights(14, "random", 5, 64), "int4"), hidden_bits=8
        )


PORTABLE = """
import torch
from lexshard.kernels.quantize import quantize
from lexshard.kernels.screen import bits, cpu, reference, tile, vnni
assert tile.LANES == 16 and bits.WIDTH == 32 and not vnni.AVAILABLE
generator = torch.Generator().manual_seed(0)
for size, columns, rows in ((70, 200, 5), (35, 640, 6)):
    weight = torch.randn(size, columns, generator=generator)
    hidden = torch.randn(rows, columns, generator=generator).numpy()
    for kind in ("int8", "int4", "int4-dither", "1-bit"):
        tier = quantize(weight, kind, direction=hidden[0])
        for width in (16, 8) if kind == "int8" else (16,):
            quantized = cpu.quantize_hidden(hidden, tier, width)
            want = reference.screen(quantized, tier)
            assert (cpu.screen(quantized, tier) == want).all(), kind
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize(
    ("name", "features"), [("generic", "+sse2"), ("haswell", "+sse4.2,+avx,+avx2,+fma")]
)
def test_every_width_of_vectors_gives_the_same(name: str, features: str) -> None:
    chosen = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    subprocess.run(
        [sys.executable, "-c", PORTABLE], check=True, env={**os.environ, **chosen}, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_no_violation_at_full_width(kind: str, bfloat16: bool) -> None:
    weight = weights(16, "random", 32_000, 1024)
    weight = weight.bfloat16() if bfloat16 else weight
    hidden = _hidden(16, 32, 1024, True)
    tier = _tier(weight, kind, hidden.mean(axis=0))
    for screened in _screens(hidden, tier):
        assert _violations(screened, hidden, weight) == 0
