"""The row kernel: right against float64, and a row's bits are its own."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.linear import PackedWeight, fits_bfloat16, linear, matrix, pack, unpack
from lexshard.kernels.linear.operand import paired_rows, rounded_rows
from lexshard.kernels.processor import multiplies_matrices, sums_as_matrices

pytestmark = pytest.mark.vectors


def _random(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# How weights are kept: float32, bfloat16, or pairs of it that round what they are multiplied with,
# as they are or compact.
KINDS = ("float32", "bfloat16", "pairs", "compact")


def _packed(weight: torch.Tensor, kind: str) -> PackedWeight:
    if kind in ("pairs", "compact"):
        return pack(weight, arithmetic="bfloat16", compact=kind == "compact")
    return pack(weight, half=kind == "bfloat16")


@settings(max_examples=60)
@given(
    rows=st.integers(1, 110),
    outputs=st.integers(1, 150),
    depth=st.integers(1, 80),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_float64(rows: int, outputs: int, depth: int, kind: str, seed: int) -> None:
    weight = _random(outputs, depth, seed)
    if kind != "float32":
        weight = weight.bfloat16().float()
    packed = _packed(weight, kind)
    x = _random(rows, depth, seed + 1)
    result = linear(x, packed)
    expected = linear(x, packed, implementation="reference")
    scale = x.norm(dim=1)[:, None] * weight.norm(dim=1)[None]
    assert result.shape == (rows, outputs)
    assert bool(((result - expected).abs() <= 1.3e-7 * depth * scale + 1e-30).all())


# Weights that caches hold, those that come from memory, and such of long rows.
@pytest.mark.parametrize(("outputs", "depth"), [(250, 96), (250, 41), (14_100, 41), (310, 5_000)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, outputs: int, depth: int) -> None:
    """The promise that makes the body batch-invariant: 0 to 230 rows, every offset."""
    weight = _random(outputs, depth, 1).bfloat16().float()
    packed = _packed(weight, kind)
    x = _random(230, depth, 2)
    whole = linear(x, packed)
    generator = np.random.default_rng(3)
    for count in [*range(40), 95, 96, 97, 98, 192, 193, 230]:
        start = int(generator.integers(0, 230 - count + 1))
        assert torch.equal(linear(x[start : start + count], packed), whole[start : start + count])


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_has_the_same_bits_whatever_is_beside_it(kind: str) -> None:
    """How many there are decides how tiles share them, and what is asked of memory meanwhile."""
    weight, x = _random(14_100, 48, 6).bfloat16().float(), _random(20, 48, 7)
    for rows in range(1, 21):
        found = linear(x[:rows], _packed(weight, kind))
        assert torch.equal(found[:, 80:270], linear(x[:rows], _packed(weight[80:270], kind)))


def test_bfloat16_storage_gives_the_bits_of_float32_storage() -> None:
    weight = _random(64, 48, 4).bfloat16().float()
    x = _random(9, 48, 5)
    assert torch.equal(linear(x, pack(weight, half=True)), linear(x, pack(weight, half=False)))


def _chain(rounded: torch.Tensor, factors: torch.Tensor, columns: Iterable[int]) -> torch.Tensor:
    """Products of some columns, each exact, added one after the other, each sum rounded once."""
    total = torch.zeros(len(rounded), len(factors))
    for column in columns:
        product = rounded[:, column, None] * factors[None, :, column]
        total = (total.double() + product).float()
    return total


@pytest.mark.parametrize("depth", [64, 37])
def test_sums_of_products_of_bfloat16_are_in_one_order(depth: int) -> None:
    """One chain on every processor, the second column of a pair first, with and without
    instructions for pairs; where sums are as matrices have them, two of every 32 columns."""
    weight, x = _random(40, depth, 9).bfloat16().float(), _random(20, depth, 10)
    factors, rounded = weight.double(), x.bfloat16().double()
    total = torch.zeros(20, 40)
    if sums_as_matrices():
        for first in range(0, depth, 32):
            last = min(first + 32, depth)
            even, odd = (_chain(rounded, factors, range(first + k, last, 2)) for k in (0, 1))
            total = total + (even + odd)
    else:
        pairs = range(0, depth, 2)
        ordered = [column for first in pairs for column in (first + 1, first) if column < depth]
        total = _chain(rounded, factors, ordered)
    assert torch.equal(linear(x, pack(weight, arithmetic="bfloat16")), total)


@pytest.mark.skipif(not multiplies_matrices(), reason="needs a processor with AMX")
@pytest.mark.parametrize("add", [False, True])
def test_vectors_add_as_matrices_do(add: bool) -> None:
    """Of 1 to 300 rows, some panels and all, of columns of every size: what AMX says is what any
    processor can compute."""
    generator = np.random.default_rng(5)
    for rows in (*range(1, 35), 63, 64, 65, 255, 256, 257, 300):
        columns, outputs = (int(each) for each in generator.integers(1, 130, 2))
        sizes = 2.0 ** generator.integers(-30, 30, (rows, columns))
        x = (generator.standard_normal((rows, columns)) * sizes).astype(np.float32)
        panels = pack(_random(outputs, columns, rows).bfloat16(), arithmetic="bfloat16").panels
        last = int(generator.integers(1, len(panels) + 1))
        part = (add, np.int64(generator.integers(0, last)), np.int64(last))
        before = generator.standard_normal((rows, 16 * len(panels))).astype(np.float32)
        found, expected = before.copy(), before.copy()
        words = paired_rows(x, panels.shape[1])
        matrix.multiply_matrices(words, panels, found, *part)
        matrix.multiply_in_vectors(words, panels, expected, *part)
        assert np.array_equal(found, expected)
        again = before.copy()
        matrix.multiply_in_vectors(rounded_rows(x, panels.shape[1]), panels, again, *part)
        assert np.array_equal(again, expected)


def test_rounding_keeps_what_is_not_finite_and_drops_what_is_not_normal() -> None:
    tie, next_tie = 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8  # between two, of which one is even
    x = torch.tensor([[math.nan, math.inf, -math.inf, 3.4e38, tie, next_tie, 1e-39, -1e-39]])
    weight = torch.eye(8)
    result = linear(x[:, 4:].contiguous(), pack(weight[4:, 4:], arithmetic="bfloat16"))
    assert result.tolist() == [[1.0, 1.0 + 2.0**-6, 0.0, 0.0]]
    alone = [
        linear(x[:, [place]], pack(torch.ones(1, 1), arithmetic="bfloat16")).item()
        for place in range(4)
    ]
    assert math.isnan(alone[0])
    assert alone[1:] == [math.inf, -math.inf, math.inf]
    tiny = pack(torch.full((1, 2), 2.0**-130), arithmetic="bfloat16")
    assert unpack(tiny).tolist() == [[0.0, 0.0]]


def test_packing_keeps_every_bit_and_chooses_the_exact_storage() -> None:
    exact, inexact = _random(33, 20, 6).bfloat16().float(), _random(33, 20, 7)
    assert fits_bfloat16(exact)
    assert not fits_bfloat16(inexact)
    assert pack(exact).panels.dtype == np.uint16
    assert pack(inexact).panels.dtype == np.float32
    for weight in (exact, inexact, exact[:, :19]):
        for arithmetic in ("float32", "bfloat16"):
            packed = pack(weight, arithmetic=arithmetic)
            assert isinstance(packed, PackedWeight)
            assert torch.equal(unpack(packed), weight)
    assert pack(exact, arithmetic="bfloat16").arithmetic == "bfloat16"
    assert pack(inexact, arithmetic="bfloat16").arithmetic == "float32"


def test_refuses_to_lose_bits() -> None:
    with pytest.raises(ValueError, match="half=False"):
        pack(_random(4, 4, 8), half=True)
