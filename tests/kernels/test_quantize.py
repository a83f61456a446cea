"""Screening tiers: what they mean, and error norms that are never too small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels import pool
from lexshard.kernels.quantize import (
    CommonDirection,
    DitheredInt4Tier,
    Int4Tier,
    Kind,
    OneBitTier,
    Tier,
    quantize,
)
from lexshard.kernels.quantize.layout import pack_nibbles, unpack_nibbles
from lexshard.kernels.screen import screen
from tests.support.tier_cases import KINDS, SHAPES, weights


def _every_row(tier: Tier) -> np.ndarray:
    return np.arange(len(tier.scale))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(SHAPES),
    rows=st.integers(1, 20),
    columns=st.integers(1, 300),
    bfloat16=st.booleans(),
)
def test_error_norms_and_sizes_hold(
    seed: int, kind: str, shape: str, rows: int, columns: int, bfloat16: bool
) -> None:
    weight = weights(seed, shape, rows, columns)
    weight = weight.bfloat16() if bfloat16 else weight
    tier = quantize(weight, kind, seed=seed)  # type: ignore[call-overload]
    exact = weight.double().numpy().astype(np.longdouble)
    meaning = tier.dequantise(_every_row(tier))
    assert meaning.shape == exact.shape
    error = np.sqrt(np.square(exact - meaning).sum(axis=1))
    if kind in ("int8", "int4"):  # the others may promise less than the whole error
        assert np.all(tier.row_slack[0] >= error)
        assert np.all(tier.row_slack[0] <= error * (1 + 1e-6) + 1e-44)
    if isinstance(tier, OneBitTier):  # its sizes are those of the parts
        meaning = meaning - tier.centre
    for rows_of in (exact, meaning.astype(np.longdouble)):
        assert np.all(tier.row_slack[1] >= np.sqrt(np.square(rows_of).sum(axis=1)))
    assert tier.largest_size == tier.row_slack[1].max()
    if isinstance(tier, Int4Tier):
        fine = np.sqrt(np.square(exact - tier.dequantise(_every_row(tier), fine=True)).sum(axis=1))
        assert np.all(tier.fine_row_slack[0] >= fine)
        assert np.all(tier.fine_row_slack[0] <= fine * (1 + 1e-6) + 1e-44)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), blocks=st.integers(1, 3))
def test_nibbles_survive_packing(seed: int, rows: int, blocks: int) -> None:
    values = np.random.default_rng(seed).integers(-8, 8, (rows, 128 * blocks))
    assert np.array_equal(unpack_nibbles(pack_nibbles(values)), values)


def test_the_low_plane_adds_four_bits() -> None:
    tier = quantize(weights(0, "random", 100, 512), "int4")
    assert tier.fine_row_slack[0].mean() < tier.row_slack[0].mean() / 12


def test_blocks_of_rows_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(1, "mixed", 50, 130)
    whole = [quantize(weight, kind) for kind in KINDS]  # type: ignore[call-overload]
    monkeypatch.setattr("lexshard.kernels.quantize.rounding.ROW_BLOCK", 7)
    for before, kind in zip(whole, KINDS, strict=True):
        with pool.every_core():
            after = quantize(weight, kind)  # type: ignore[call-overload]
        for name in before.__slots__:
            if name != "rotation":
                assert np.array_equal(getattr(before, name), getattr(after, name)), name


def _dithered(weight: torch.Tensor, seed: int) -> DitheredInt4Tier:
    return quantize(weight, "int4-dither", seed=seed)


def test_coins_depend_on_the_seed_alone() -> None:
    weight = weights(2, "random", 4, 64)
    assert np.array_equal(_dithered(weight, 5).coins, _dithered(2 * weight, 5).coins)
    assert not np.array_equal(_dithered(weight, 5).coins, _dithered(weight, 6).coins)


def test_dithered_errors_are_those_of_fair_uniform_coins() -> None:
    """Over 2,000 seeds: mean within 5 standard errors of zero (false alarms of six rows: 4e-6),
    mean square within 5 standard errors of ``sum_j Delta_j^2 h_j^2 / 12`` (the fourth moment of
    the sum is at most 3 times its squared variance, so a standard error is at most sqrt(2/2000)).
    """
    weight = weights(3, "random", 6, 96)
    hidden = np.random.default_rng(3).standard_normal(96)
    seeds = 2000
    errors = np.empty((seeds, 6))
    for seed in range(seeds):
        tier = _dithered(weight, seed)
        errors[seed] = (tier.dequantise(np.arange(6)) - weight.double().numpy()) @ hidden
    steps = np.repeat(tier.multipliers * tier.scale[:, None].astype(np.float64), 32, axis=1)
    variance = (np.square(steps[:, :96] * hidden)).sum(axis=1) / 12
    assert np.all(np.abs(errors.mean(axis=0)) < 5 * np.sqrt(variance / seeds))
    assert np.all(np.abs(np.square(errors).mean(axis=0) / variance - 1) < 5 * np.sqrt(2 / seeds))


def test_hoeffding_promises_less_than_the_whole_error_for_wide_rows() -> None:
    weight = weights(4, "random", 20, 4096)
    tier = _dithered(weight, 0)
    error = np.linalg.norm(weight.double().numpy() - tier.dequantise(np.arange(20)), axis=1)
    assert np.all(tier.row_slack[0] < 0.5 * error)
    # sqrt(ln(2e12) / 2) steps, and for 2**-16 of a step per column and rounding one percent more.
    largest = (tier.multipliers.max(axis=1) * tier.scale).astype(np.float64)
    promised = np.sqrt(np.log(2e12) / 2) * largest
    assert np.all(tier.row_slack[0] >= promised)
    assert np.all(tier.row_slack[0] <= 1.01 * promised)


def test_products_with_a_common_direction_are_rounded_once() -> None:
    weight = weights(5, "random", 30, 200)
    vector = np.random.default_rng(5).standard_normal(200).astype(np.float32)
    common = quantize(weight, "int8", direction=vector).common
    assert isinstance(common, CommonDirection)
    exact = weight.double().numpy().astype(np.longdouble) @ vector.astype(np.longdouble)
    assert np.array_equal(common.products, exact.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1e-37, 1e38])
def test_a_direction_whose_products_fp32_does_not_hold_is_left_out(
    kind: Kind, length: float
) -> None:
    """Its estimates were infinite or none at all, or off by seven times their bound."""
    weight = weights(6, "random", 30, 200) * (1e-4 if length < 1 else 1e4)
    vector = np.random.default_rng(6).standard_normal(200)
    vector *= length / np.linalg.norm(vector)
    hidden = np.stack([vector / length, np.zeros(200)]).astype(np.float32)
    tier = quantize(weight, kind, direction=vector.astype(np.float32))
    assert tier.common is None
    screened = screen(hidden, tier)
    exact = hidden.astype(np.float64) @ weight.double().numpy().T
    bound = screened.hidden_slack @ screened.row_slack.astype(np.float64)
    assert np.all(np.abs(screened.estimate - exact) <= bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(kind: str, value: float) -> None:
    weight = torch.ones(3, 40)
    weight[1, 7] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight, kind)  # type: ignore[call-overload]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="fp32 or bf16"):
        quantize(torch.ones(3, 4, dtype=torch.float64), "int8")
    with pytest.raises(ValueError, match="common direction"):
        quantize(torch.ones(3, 4), "int8", direction=np.zeros(4, np.float32))
