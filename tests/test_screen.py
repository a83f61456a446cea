"""Screens: every estimate within its bound of the canonical logit, whatever is aimed at it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantize import KINDS, SHAPES, weights

from kernels import pool
from kernels.quantize import Int4Tier, Tier, quantize
from kernels.rows import canonical_logits
from kernels.screen import Screened, cpu, hidden_cpu, reference, refine, screen

settings.register_profile("screen", deadline=None, max_examples=60)
settings.load_profile("screen")

DETERMINISTIC = ("int8", "int4")


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
    both = [_refined(hidden, tier)] if isinstance(tier, Int4Tier) else []
    return [screen(hidden, tier), *both]


def _violations(screened: Screened, hidden: np.ndarray, weight: torch.Tensor) -> int:
    """How many estimates are beyond their bound from the canonical logit or the exact product."""
    bound = _bound(screened)
    exact = hidden.astype(np.float64) @ weight.double().numpy().T
    canonical = canonical_logits(hidden, weight).astype(np.float64)
    beyond = np.abs(screened.estimate - canonical) > bound
    return int(beyond.sum() + (np.abs(screened.estimate - exact) > bound).sum())


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


@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 9),
    size=st.integers(1, 40),
    columns=st.integers(1, 300),
    centred=st.booleans(),
)
def test_cpu_equals_reference(
    seed: int, kind: str, shape: str, rows: int, size: int, columns: int, centred: bool
) -> None:
    """From equal integers equal bits; the integers themselves come from sums in other orders."""
    hidden = _hidden(seed, rows, columns, False)
    tier = _tier(weights(seed, shape, size, columns), kind, hidden[0] if centred else None)
    quantized = hidden_cpu.quantize_hidden(hidden, tier)
    assert np.array_equal(cpu.screen(quantized, tier), reference.screen(quantized, tier))
    whole = screen(hidden, tier, implementation="reference")
    here = screen(hidden, tier)
    assert np.allclose(here.hidden_slack, whole.hidden_slack, rtol=1e-6, atol=0)
    assert np.all(np.abs(here.estimate - whole.estimate) <= 1e-6 * _bound(whole) + 1e-30)
    if isinstance(tier, Int4Tier):
        random = np.random.default_rng(seed)
        offsets = np.concatenate([[0], np.cumsum(random.integers(0, size + 1, rows))])
        ids = random.integers(0, size, offsets[-1]).astype(np.int32)
        want = reference.refine(quantized, tier, ids, offsets)
        assert np.array_equal(refine(hidden, tier, ids, offsets).estimate, want)


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


def test_the_rounding_of_hidden_states_is_bounded_too() -> None:
    """Weights that are exact in int8 and a hidden state whose roundings all point one way: with
    that part of the bound halved it must fail."""
    columns = 1024
    random = np.random.default_rng(8)
    signs = random.choice([-1.0, 1.0], columns)
    weight = torch.from_numpy((127 * signs)[None].astype(np.float32))
    tier = _tier(weight, "int8")
    assert tier.row_slack[0, 0] == 0
    hidden = (0.49 * signs + random.integers(-40, 40, columns))[None]
    hidden[0, 0] = 32767.0  # the step is 1
    hidden = hidden.astype(np.float32)
    screened = screen(hidden, tier)
    assert _violations(screened, hidden, weight) == 0
    halved = screened._replace(hidden_slack=0.5 * screened.hidden_slack)
    assert _violations(halved, hidden, weight) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1024, 4096])
def test_the_largest_sums_fit_32_bits(kind: str, columns: int) -> None:
    """Constant rows have the largest integers, and a parallel hidden state the largest sum."""
    weight = torch.full((3, columns), 7.0)
    weight[1:] = weights(9, "random", 2, columns)
    hidden = np.full((1, columns), 5.0, np.float32)
    tier = _tier(weight, kind)
    quantized = hidden_cpu.quantize_hidden(hidden, tier)
    screened = screen(hidden, tier)
    assert np.array_equal(screened.estimate, reference.screen(quantized, tier))
    assert _violations(screened, hidden, weight) == 0
    if isinstance(tier, Int4Tier):
        assert _violations(_refined(hidden, tier), hidden, weight) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_do_not_depend_on_batch_or_threads(kind: str) -> None:
    weight, hidden = weights(10, "random", 3001, 256), _hidden(10, 7, 256, False)
    tier = _tier(weight, kind)
    every = screen(hidden, tier).estimate
    for row in range(7):
        assert np.array_equal(screen(hidden[row : row + 1], tier).estimate[0], every[row])
    pool.set_threads(3)
    try:
        assert np.array_equal(screen(hidden, tier).estimate, every)
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_could_overflow_has_no_bound_and_finite_estimates(kind: str) -> None:
    weight = weights(12, "random", 5, 64) * 1e20
    hidden = _hidden(12, 3, 64, False)
    hidden[1] *= 1e20
    screened = screen(hidden, _tier(weight, kind))
    assert np.isfinite(screened.estimate).all()
    assert np.isinf(_bound(screened)[1]).all()
    assert np.isfinite(_bound(screened)[[0, 2]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zero_and_tiny_hidden_states(kind: str) -> None:
    weight = weights(13, "random", 20, 64)
    hidden = np.zeros((3, 64), np.float32)
    hidden[1] = 1e-45
    hidden[2, 5] = 1e-38
    assert _violations(screen(hidden, _tier(weight, kind)), hidden, weight) == 0


def test_what_cannot_be_screened_is_refused() -> None:
    tier = _tier(weights(14, "random", 5, 64), "int8")
    with pytest.raises(ValueError, match="NaN or infinity"):
        screen(np.full((1, 64), np.nan, np.float32), tier)
    with pytest.raises(ValueError, match=r"hidden \[N, 64\] in fp32 expected"):
        screen(np.ones((1, 63), np.float32), tier)


SCRIPT = """
import numpy as np, torch
from kernels.quantize import quantize
from kernels.screen import screen
from kernels.screen.triton_kernel import place
generator = torch.Generator().manual_seed(0)
for size, columns, rows in ((70, 200, 5), (33, 64, 1)):
    weight = torch.randn(size, columns, generator=generator)
    hidden = torch.randn(rows, columns, generator=generator)
    for kind in ("int8", "int4", "int4-dither", "1-bit"):
        for direction in (None, hidden[0].numpy()):
            tier = quantize(weight, kind, direction=direction)
            want = screen(hidden, tier, implementation="reference")
            got = screen(hidden, place(tier, "cpu"))
            assert np.array_equal(got.estimate.numpy(), want.estimate), kind
            assert np.array_equal(got.hidden_slack.numpy(), want.hidden_slack), kind
"""


def test_triton_equals_cpu_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=root)


PORTABLE = """
import torch
from kernels.quantize import quantize
from kernels.screen import bits, cpu, hidden_cpu, reference, tile
assert tile.LANES == 16 and bits.WIDTH == 32
generator = torch.Generator().manual_seed(0)
for size, columns, rows in ((70, 200, 5), (35, 640, 6)):
    weight = torch.randn(size, columns, generator=generator)
    hidden = torch.randn(rows, columns, generator=generator).numpy()
    for kind in ("int8", "int4", "int4-dither", "1-bit"):
        tier = quantize(weight, kind, direction=hidden[0])
        quantized = hidden_cpu.quantize_hidden(hidden, tier)
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
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", PORTABLE], check=True, env={**os.environ, **chosen}, cwd=root
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8])
def test_bounds_hold_on_the_gpu(kind: str, rows: int) -> None:
    from kernels.screen.triton_kernel import place

    weight, hidden = weights(15, "random", 3000, 640), _hidden(15, rows, 640, True)
    tier = _tier(weight, kind, hidden.mean(axis=0))
    placed = screen(torch.from_numpy(hidden).cuda(), place(tier, "cuda"))
    on_host = Screened(*(part.cpu().numpy() for part in placed))
    assert _violations(on_host, hidden, weight) == 0
    # The step of a hidden state may differ in its last float64 bit, and an estimate with it.
    assert np.allclose(on_host.estimate, screen(hidden, tier).estimate, rtol=1e-4, atol=1e-2)


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
