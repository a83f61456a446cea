"""The row kernel: right against float64, and a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels.linear import PackedWeight, fits_bfloat16, linear, pack, unpack

pytestmark = pytest.mark.vectors


def _random(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 110),
    outputs=st.integers(1, 150),
    depth=st.integers(1, 80),
    half=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_agrees_with_float64(rows: int, outputs: int, depth: int, half: bool, seed: int) -> None:
    weight = _random(outputs, depth, seed)
    if half:
        weight = weight.bfloat16().float()
    x = _random(rows, depth, seed + 1)
    result = linear(x, pack(weight))
    expected = linear(x, pack(weight), implementation="reference")
    scale = x.norm(dim=1)[:, None] * weight.norm(dim=1)[None]
    assert result.shape == (rows, outputs)
    assert bool(((result - expected).abs() <= 1.3e-7 * depth * scale + 1e-30).all())


@pytest.mark.parametrize("half", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(half: bool) -> None:
    """The promise that makes the body batch-invariant: 0 to 230 rows, every offset."""
    weight = _random(200, 96, 1).bfloat16().float()
    packed = pack(weight, half=half)
    x = _random(230, 96, 2)
    whole = linear(x, packed)
    generator = np.random.default_rng(3)
    for count in [*range(40), 95, 96, 97, 98, 192, 193, 230]:
        start = int(generator.integers(0, 230 - count + 1))
        assert torch.equal(linear(x[start : start + count], packed), whole[start : start + count])


def test_bfloat16_storage_gives_the_bits_of_float32_storage() -> None:
    weight = _random(64, 48, 4).bfloat16().float()
    x = _random(9, 48, 5)
    assert torch.equal(linear(x, pack(weight, half=True)), linear(x, pack(weight, half=False)))


def test_packing_keeps_every_bit_and_chooses_the_exact_storage() -> None:
    exact, inexact = _random(33, 20, 6).bfloat16().float(), _random(33, 20, 7)
    assert fits_bfloat16(exact)
    assert not fits_bfloat16(inexact)
    assert pack(exact).panels.dtype == np.uint16
    assert pack(inexact).panels.dtype == np.float32
    for weight in (exact, inexact):
        packed = pack(weight)
        assert isinstance(packed, PackedWeight)
        assert torch.equal(unpack(packed), weight)


def test_refuses_to_lose_bits() -> None:
    with pytest.raises(ValueError, match="half=False"):
        pack(_random(4, 4, 8), half=True)
