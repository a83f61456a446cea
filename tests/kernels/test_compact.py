"""Compact weights: every bit of what they were, and of every product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lexshard.kernels.linear import compact, cpu, pack
from lexshard.kernels.linear.compact import compacted, expanded, stacked
from lexshard.kernels.linear.operand import paired_rows, rounded_rows
from lexshard.kernels.linear.tile import MULTIPLIES_PAIRS
from lexshard.kernels.processor import sums_as_matrices

pytestmark = pytest.mark.vectors

Words = npt.NDArray[np.uint32]


def words_of(outputs: int, depth: int, seed: int, rare: float = 0.001) -> Words:
    """Panels of random weights; a part of them, the ``rare`` ones, are of any size, not finite or
    below the normal numbers."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((outputs, depth)).astype(np.float32) * 0.02
    odd = generator.integers(0, 2**16, weight.shape).astype(np.uint32) << 16
    bits = np.where(generator.random(weight.shape) < rare, odd, weight.view(np.uint32))
    half = torch.from_numpy(bits.view(np.float32)).bfloat16()
    return pack(half, arithmetic="bfloat16").panels


@given(
    pairs=st.integers(1, 5),
    depth=st.integers(1, 400),
    rare=st.sampled_from([0.0, 0.001, 0.01, 0.2]),
    seed=st.integers(0, 2**31),
)
def test_no_bit_is_lost(pairs: int, depth: int, rare: float, seed: int) -> None:
    words = words_of(32 * pairs, depth, seed, rare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact, "WORTH", 2.0)
        made = compacted(words)
    assert made is not None
    assert np.array_equal(expanded(made, words.shape[1]), words)


@pytest.mark.parametrize("columns", [640, 2048])
def test_three_quarters_of_the_bytes_are_left(columns: int) -> None:
    words = words_of(320, columns, 1, rare=0.0)
    made = compacted(words)
    assert made is not None
    assert made.nbytes < 0.78 * words.nbytes


def test_what_would_hardly_be_smaller_stays_as_it_is() -> None:
    """So does an odd number of panels: two are one stream."""
    random = np.random.default_rng(2).integers(0, 2**32, (4, 32, 16), np.uint32)
    assert compacted(random) is None
    assert compacted(words_of(48, 640, 3)) is None
    assert stacked([compacted(words_of(32, 640, 4)), None]) is None


def test_layers_of_other_lengths_are_one_stack() -> None:
    layers = [words_of(64, 640, seed, rare) for seed, rare in ((5, 0.0), (6, 0.002), (7, 0.0))]
    stack = stacked(compacted(layer) for layer in layers)
    assert stack is not None
    for made, words in zip(stack, layers, strict=True):
        assert np.array_equal(expanded(made, words.shape[1]), words)


@pytest.mark.skipif(sums_as_matrices(), reason="words are summed in another order there")
@pytest.mark.parametrize("depth", [40, 650])
@pytest.mark.parametrize("add", [False, True])
def test_products_are_those_of_the_words(
    depth: int, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 to 20 rows and of more than a block of them, from any panel to any other."""
    monkeypatch.setattr(compact, "WORTH", 2.0)
    words = words_of(128, depth, 8, rare=0.01)
    made = compacted(words)
    assert made is not None
    operand = paired_rows if MULTIPLIES_PAIRS else rounded_rows
    generator = np.random.default_rng(9)
    for rows in (*range(1, 21), 97, 200):
        x = operand(generator.standard_normal((rows, depth)).astype(np.float32), words.shape[1])
        first, last = sorted(generator.integers(0, 9, 2).tolist())
        before = generator.standard_normal((rows, 128)).astype(np.float32)
        expected, found = before.copy(), before.copy()
        part = (add, np.int64(first), np.int64(last))
        cpu.multiply_panels(x, words, expected, *part)
        cpu.multiply_panels(x, made, found, *part)
        assert np.array_equal(found, expected, equal_nan=True)
        assert np.array_equal(found[:, 16 * last :], before[:, 16 * last :])
