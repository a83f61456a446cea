"""The 1-bit tier: its error has the distribution that its bound is derived from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lexshard.kernels.quantize import OneBitTier, one_bit, quantize, rotation
from lexshard.kernels.quantize.layout import BLOCK
from lexshard.kernels.rows import canonical_logits
from lexshard.kernels.screen import Screened, screen
from tests.support.tier_cases import weights


def _bound(screened: Screened) -> np.ndarray:
    return np.asarray(screened.hidden_slack @ screened.row_slack.astype(np.float64))


def _hidden(weight: torch.Tensor, rows: int) -> np.ndarray:
    """Hidden states [rows, d] of many kinds: random, the output rows and their differences, single
    columns, constants."""
    columns = weight.shape[1]
    random = np.random.default_rng(columns)
    wide = weight.numpy()
    kinds = [
        random.standard_normal((rows, columns)) + random.standard_normal(columns),
        wide,
        wide[1:] - wide[:-1],
        100.0 * np.eye(columns),
        np.ones((1, columns)),
    ]
    share = [kind[: rows // len(kinds)] for kind in kinds[1:]]
    every = np.concatenate([*share, kinds[0]])[:rows]
    return np.ascontiguousarray(every, np.float32)


def _normalised(
    weight: torch.Tensor, tier: OneBitTier, hidden: np.ndarray, seed: int
) -> np.ndarray:
    """Errors of the ideal code over the standard deviations that the derivation gives: [V, N]."""
    turn, blocks = rotation.draw_rotation(weight.shape[1], seed)
    row = rotation.rotate(weight.double().numpy() - tier.centre, turn, blocks)
    state = rotation.rotate(hidden.astype(np.float64), turn, blocks)
    row, state = row.reshape(len(row), -1, BLOCK), state.reshape(len(state), -1, BLOCK)
    scales = one_bit.block_scales(row)
    error = np.einsum("vk,vkb,nkb->vn", scales, np.sign(row), state)
    along = np.einsum("vkb,nkb->vnk", row, state)
    error -= along.sum(axis=2)
    squares = np.square(row).sum(axis=2)
    spread = BLOCK * np.square(scales) - squares
    rest = np.square(state).sum(axis=2)[None] - np.square(along) / squares[:, None]
    variance = (spread[:, None] * np.maximum(rest, 0.0)).sum(axis=2) / (BLOCK - 1)
    return np.asarray(error / np.sqrt(variance))


@pytest.mark.slow
def test_no_violation_in_a_million_triples_and_many_with_half_the_bound() -> None:
    """(row, hidden state, rotation): 320 rotations of 60 rows and 64 hidden states each.

    The stated probability of a violation is 1.2e-6 for the whole test. Half the bound is at least
    3.7 standard deviations: some 200 of the errors lie beyond, if few rows are far from the bound.
    """
    triples = beyond = halved = 0
    for shape, columns in (("random", 200), ("mixed", 128), ("clustered", 300), ("random", 256)):
        weight = weights(1, shape, 60, columns)
        hidden = _hidden(weight, 64)
        canonical = canonical_logits(hidden, weight).astype(np.float64)
        for seed in range(80):
            screened = screen(hidden, quantize(weight, "1-bit", seed=seed))
            error, bound = np.abs(screened.estimate - canonical), _bound(screened)
            triples += error.size
            beyond += int((error > bound).sum())
            halved += int((error > 0.5 * bound).sum())
    assert triples > 1_200_000
    assert beyond == 0
    assert halved > 30


@pytest.mark.parametrize("rotations", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_errors_have_the_standard_deviation_of_the_derivation(rotations: int) -> None:
    """Each rotation gives the mean square of 50 x 40 normalised errors, expected 1. Their average
    within 5 of its own standard errors of 1 (false alarms: 6e-7), which are below 1% of 400; and
    the average error within 5 standard errors of 0."""
    weight = weights(2, "random", 50, 256)
    hidden = _hidden(weight, 40)[8:]  # without the rows themselves: their own errors are zero
    means, squares = [], []
    for seed in range(rotations):
        errors = _normalised(weight, quantize(weight, "1-bit", seed=seed), hidden, seed)
        means.append(errors.mean())
        squares.append(np.square(errors).mean())
    deviation = np.std(squares) / np.sqrt(len(squares))
    assert deviation < 0.2 / np.sqrt(rotations)
    assert abs(np.mean(squares) - 1.0) < 5 * deviation
    assert abs(np.mean(means)) < 5 * np.std(means) / np.sqrt(len(means))


def test_the_bound_is_seven_and_a_half_deviations_and_little_more() -> None:
    """At d = 1,024 the block form of the bound costs under 4%, rounding and slack included."""
    weight = weights(3, "random", 500, 1024)
    tier = quantize(weight, "1-bit")
    hidden = np.random.default_rng(3).standard_normal((20, 1024)).astype(np.float32)
    error = weight.double().numpy() - tier.dequantise(np.arange(500))
    deviations = np.linalg.norm(error, axis=1) * np.linalg.norm(hidden, axis=1)[:, None] / 32.0
    assert tier.failure_probability == 1e-12
    ratio = _bound(screen(hidden, tier)) / deviations
    assert np.all(ratio > np.sqrt(2 * np.log(2e12)) * 0.99)
    assert ratio.mean() < np.sqrt(2 * np.log(2e12)) * 1.04


def test_no_violation_at_full_width() -> None:
    """20,000 rows and 50 hidden states with outliers around a mean: probability 1e-6 in all."""
    weight = weights(4, "random", 20_000, 640).bfloat16()
    random = np.random.default_rng(4)
    hidden = random.standard_normal((50, 640)) + 3 * random.standard_normal(640)
    hidden[:, 7] *= 100
    hidden = hidden.astype(np.float32)
    for direction in (None, hidden.mean(axis=0)):
        screened = screen(hidden, quantize(weight, "1-bit", direction=direction))
        canonical = canonical_logits(hidden, weight).astype(np.float64)
        assert not np.any(np.abs(screened.estimate - canonical) > _bound(screened))


@pytest.mark.slow
def test_no_violation_in_ten_million_triples_at_full_width() -> None:
    """Ten rotations of 20,000 rows and 64 hidden states: probability 1.3e-5 in all."""
    weight = weights(9, "random", 20_000, 640)
    hidden = _hidden(weight, 64)
    canonical = canonical_logits(hidden, weight).astype(np.float64)
    for seed in range(10):
        screened = screen(hidden, quantize(weight, "1-bit", seed=seed))
        assert not np.any(np.abs(screened.estimate - canonical) > _bound(screened))


@pytest.mark.slow
def test_rotations_are_uniform() -> None:
    """Of a Haar matrix of order n > 4 the trace has moments 0, 1, 0, 3, and the trace of the square
    mean 1 and variance 2 (Diaconis and Shahshahani 1994). 1,000 matrices; every average within 5
    standard errors: false alarms 2e-6."""
    generator = np.random.Generator(np.random.Philox(key=0))
    matrices = np.concatenate([rotation._haar(generator, 50) for _ in range(20)])
    assert np.allclose(matrices @ matrices.transpose(0, 2, 1), np.eye(BLOCK), atol=1e-13)
    trace = np.einsum("kii->k", matrices)
    square = np.einsum("kij,kji->k", matrices, matrices)
    root = np.sqrt(len(trace))
    assert abs(trace.mean()) < 5 / root
    assert abs(np.square(trace).mean() - 1) < 5 * np.sqrt(2) / root
    assert abs((trace**4).mean() - 3) < 5 * np.sqrt(96) / root
    assert abs(square.mean() - 1) < 5 * np.sqrt(2) / root


@pytest.mark.parametrize("columns", [1, 64, 128, 640, 1000, 3584])
def test_rotations_keep_lengths_and_turn_back(columns: int) -> None:
    turn, blocks = rotation.draw_rotation(columns, 5)
    vectors = np.random.default_rng(5).standard_normal((20, columns))
    turned = rotation.rotate(vectors, turn, blocks)
    assert turned.shape[1] % BLOCK == 0
    length = np.linalg.norm(vectors, axis=1)
    assert np.allclose(np.linalg.norm(turned, axis=1), length, rtol=1e-12)
    rounded = rotation.rotate(vectors, turn, turn.blocks.astype(np.float64))
    assert np.all(np.linalg.norm(rounded - turned, axis=1) < rotation.ROTATION_ERROR * length)
    assert np.allclose(rotation.rotate_back(turned, turn, columns), vectors, atol=1e-5)


def test_the_rotation_depends_on_the_seed_alone() -> None:
    weight = weights(6, "random", 70, 200)
    first, second = (quantize(part, "1-bit", seed=3).rotation for part in (weight, 2 * weight[:5]))
    assert np.array_equal(first.blocks, second.blocks)
    assert np.array_equal(first.signs, second.signs)
    assert not np.array_equal(first.blocks, quantize(weight, "1-bit", seed=4).rotation.blocks)


def test_signs_in_doubt_are_paid_for() -> None:
    """A turned row with a zero in it: rounding decides its sign, and the bound covers both."""
    turn, blocks = rotation.draw_rotation(128, 0)
    turned = np.random.default_rng(7).standard_normal((2, 1, BLOCK))
    length = np.linalg.norm(turned, axis=2)[:, 0]
    scales = one_bit.block_scales(turned)
    sure = one_bit.error_bound(turned, scales, scales, length)
    turned[0, 0, 17] = 0.0
    scales = one_bit.block_scales(turned)
    doubtful = one_bit.error_bound(turned, scales, scales, length)
    assert doubtful[0] > sure[0] + 1.9 * scales[0, 0]
    assert doubtful[1] == sure[1]
    row = rotation.rotate_back(turned.reshape(2, -1), turn, 128)
    back = rotation.rotate(row, turn, blocks)
    assert abs(back[0, 17]) < 1e-5


def test_it_is_a_sixteenth_of_bfloat16() -> None:
    tier = quantize(weights(8, "random", 640, 1024), "1-bit")
    stored = tier.signs.nbytes + tier.multipliers.nbytes + tier.scale.nbytes
    assert stored < 1.1 * 640 * 1024 * 2 / 16
