"""The row kernel: right against float64, and a row's bits are its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.linear import PackedWeight, fits_bfloat16, linear, pack, unpack

pytestmark = pytest.mark.vectors


def _random(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


# How weights are kept: float32, bfloat16, or pairs of it that round what they are multiplied with.
KINDS = ("float32", "bfloat16", "pairs")


def _packed(weight: torch.Tensor, kind: str) -> PackedWeight:
    if kind == "pairs":
        return pack(weight, arithmetic="bfloat16")
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


@pytest.mark.parametrize("depth", [96, 41])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch(kind: str, depth: int) -> None:
    """The promise that makes the body batch-invariant: 0 to 230 rows, every offset."""
    weight = _random(200, depth, 1).bfloat16().float()
    packed = _packed(weight, kind)
    x = _random(230, depth, 2)
    whole = linear(x, packed)
    generator = np.random.default_rng(3)
    for count in [*range(40), 95, 96, 97, 98, 192, 193, 230]:
        start = int(generator.integers(0, 230 - count + 1))
        assert torch.equal(linear(x[start : start + count], packed), whole[start : start + count])


def test_bfloat16_storage_gives_the_bits_of_float32_storage() -> None:
    weight = _random(64, 48, 4).bfloat16().float()
    x = _random(9, 48, 5)
    assert torch.equal(linear(x, pack(weight, half=True)), linear(x, pack(weight, half=False)))


@pytest.mark.parametrize("depth", [64, 37])
def test_sums_of_pairs_are_one_chain_on_every_processor(depth: int) -> None:
    """The second column of a pair first, each product exact and each sum rounded once: with and
    without instructions for pairs."""
    weight, x = _random(40, depth, 9).bfloat16().float(), _random(20, depth, 10)
    factors, rounded = weight.double(), x.bfloat16().double()
    total = torch.zeros(20, 40)
    for first in range(0, depth, 2):
        for column in range(min(first + 1, depth - 1), first - 1, -1):
            product = rounded[:, column, None] * factors[None, :, column]
            total = (total.double() + product).float()
    assert torch.equal(linear(x, pack(weight, arithmetic="bfloat16")), total)


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
