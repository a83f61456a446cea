"""Canonical logits: one arithmetic, whatever computes it and whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lexshard.kernels.rows import as_array, canonical_logits, postprocess, reference
from tests.support.interpreted import interpret

pytestmark = pytest.mark.vectors


def _case(
    seed: int, columns: int, rows: int, size: int, bfloat16: bool
) -> tuple[np.ndarray, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp(4 * torch.randn(rows, columns, generator=generator))
    hidden = torch.randn(rows, columns, generator=generator) * magnitudes
    weight = torch.randn(size, columns, generator=generator)
    return hidden.numpy(), weight.bfloat16() if bfloat16 else weight


@given(
    seed=st.integers(0, 2**32),
    columns=st.integers(1, 70),
    rows=st.integers(1, 8),
    size=st.integers(1, 40),
    bfloat16=st.booleans(),
)
def test_cpu_equals_reference(
    seed: int, columns: int, rows: int, size: int, bfloat16: bool
) -> None:
    hidden, weight = _case(seed, columns, rows, size, bfloat16)
    every = canonical_logits(hidden, weight)
    assert np.array_equal(every, reference.canonical_logits(hidden, as_array(weight)))
    random = np.random.default_rng(seed)
    counts = random.integers(0, size + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ids = np.concatenate([random.permutation(size)[:count] for count in counts]).astype(np.int32)
    gathered = canonical_logits(hidden, weight, ids, offsets)
    assert np.array_equal(gathered, every[np.repeat(np.arange(rows), counts), ids])
    plain = reference.canonical_logits(hidden, as_array(weight), ids, offsets)
    assert np.array_equal(gathered, plain)


def test_a_row_does_not_depend_on_its_batch() -> None:
    hidden, weight = _case(0, 100, 7, 50, False)
    every = canonical_logits(hidden, weight)
    for row in range(7):
        assert np.array_equal(every[row], canonical_logits(hidden[row : row + 1], weight)[0])


def test_the_sum_is_within_one_rounding_of_the_exact_one() -> None:
    hidden, weight = _case(1, 200, 3, 30, True)
    exact = hidden.astype(np.longdouble) @ weight.double().numpy().astype(np.longdouble).T
    got = canonical_logits(hidden, weight)
    scale = np.abs(hidden.astype(np.float64)) @ np.abs(weight.double().numpy().T)
    assert np.all(np.abs(got - exact) <= np.abs(exact) * 2.0**-24 + scale * 200 * 2.0**-53)


def test_bf16_bits_in_numpy_are_the_torch_tensor() -> None:
    hidden, weight = _case(2, 33, 2, 20, True)
    bits = weight.view(torch.uint16).numpy()
    assert np.array_equal(canonical_logits(hidden, bits), canonical_logits(hidden, weight))


def test_no_candidates_give_no_logits() -> None:
    hidden, weight = _case(3, 20, 2, 5, False)
    empty = canonical_logits(hidden, weight, np.empty(0, np.int32), np.zeros(3, np.int64))
    assert empty.shape == (0,)


def test_wrong_shapes_and_types_are_refused() -> None:
    hidden, weight = _case(4, 20, 2, 5, False)
    with pytest.raises(ValueError, match="expected, got"):
        canonical_logits(hidden[:, :19], weight)
    with pytest.raises(ValueError, match="convert"):
        canonical_logits(hidden, weight.double())
    with pytest.raises(ValueError, match="together"):
        canonical_logits(hidden, weight, np.zeros(1, np.int32))


def test_postprocessing_is_bias_then_scale_then_softcap() -> None:
    logits = np.array([-100.0, 0.0, 3.0], np.float32)
    bias = np.array([1.0, 2.0, -1.0], np.float32)
    expected = 30.0 * np.tanh((logits + bias).astype(np.float64) * 0.5 / 30.0)
    got = postprocess(logits, bias=bias, scale=0.5, softcap=30.0)
    assert got.dtype == np.float32
    assert np.array_equal(got, expected.astype(np.float32))
    assert postprocess(logits) is logits


SCRIPT = """
import numpy as np, torch
from lexshard.kernels.rows import as_array, reference
from lexshard.kernels.rows.triton_kernel import canonical_logits
random = np.random.default_rng(0)
offsets = np.array([0, 3, 3, 40])
for columns in (1, 16, 50):
    hidden = random.standard_normal((3, columns)).astype(np.float32) * 1e3
    weight = torch.from_numpy(random.standard_normal((70, columns)).astype(np.float32))
    ids = random.integers(0, 70, 40).astype(np.int32)
    for matrix in (weight, weight.bfloat16()):
        for where in ((), (ids, offsets)):
            got = canonical_logits(torch.from_numpy(hidden), matrix, *map(torch.from_numpy, where))
            want = reference.canonical_logits(hidden, as_array(matrix), *where)
            assert np.array_equal(got.numpy(), want)
several = random.standard_normal((11, 40)).astype(np.float32)
weight = torch.from_numpy(random.standard_normal((37, 40)).astype(np.float32)).bfloat16()
got = canonical_logits(torch.from_numpy(several), weight).numpy()
for row in range(11):
    alone = reference.canonical_logits(several[row : row + 1], as_array(weight))
    assert np.array_equal(got[row : row + 1], alone)
"""

# Every exponent that the two types have, zeros of both signs and subnormals.
EXTREMES = """
import numpy as np, torch
from lexshard.kernels.rows import as_array, reference
from lexshard.kernels.rows.triton_kernel import canonical_logits
random = np.random.default_rng(1)
bits = random.integers(0, 2**31, (70, 24)).astype(np.uint32)
bits[:, ::3] &= 0x007FFFFF  # subnormals
bits[::5] = 0
bits |= random.integers(0, 2, bits.shape).astype(np.uint32) << 31
weight = torch.from_numpy(np.nan_to_num(bits.view(np.float32)).clip(-3e38, 3e38))
hidden = random.standard_normal((9, 24)).astype(np.float32)
hidden[1] *= 1e-30
hidden[2] = np.finfo(np.float32).max
hidden[3] = 1e-45
with np.errstate(over="ignore"):
    for matrix in (weight, weight.bfloat16()):
        for rows in (hidden[:1], hidden[1:3], hidden[3:6], hidden):
            got = canonical_logits(torch.from_numpy(rows), matrix)
            want = reference.canonical_logits(rows, as_array(matrix))
            assert np.array_equal(got.numpy(), want)
"""


def test_triton_equals_reference_in_the_interpreter() -> None:
    interpret(SCRIPT)


def test_every_exponent_in_the_interpreter() -> None:
    interpret(EXTREMES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bfloat16", [False, True])
def test_triton_equals_cpu_on_the_gpu(bfloat16: bool) -> None:
    from lexshard.kernels.rows import triton_kernel

    hidden, weight = _case(5, 250, 5, 3000, bfloat16)
    got = triton_kernel.canonical_logits(torch.from_numpy(hidden).cuda(), weight.cuda())
    assert np.array_equal(got.cpu().numpy(), canonical_logits(hidden, weight))


@pytest.mark.slow
@pytest.mark.parametrize("bfloat16", [False, True])
def test_cpu_equals_reference_at_full_width(bfloat16: bool) -> None:
    hidden, weight = _case(6, 1024, 16, 32_000, bfloat16)
    every = canonical_logits(hidden, weight)
    assert np.array_equal(every, reference.canonical_logits(hidden, as_array(weight)))
