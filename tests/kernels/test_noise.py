"""The one draw: the same noise from every implementation, and truly Gumbel noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lexshard.kernels.noise import gumbel_noise, gumbel_row, reference
from lexshard.kernels.noise.cpu import block_draw, block_minimum, noise_ceiling
from lexshard.kernels.noise.reference import philox
from tests.support.interpreted import interpret

KEYS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_published_vectors(word: int, key: int, expected: tuple[int, ...]) -> None:
    words = np.full(1, word, np.uint64)
    assert tuple(int(x[0]) for x in philox((words, words, words, words), key)) == expected


def test_a_million_tokens_agree_bit_for_bit() -> None:
    row = gumbel_row(2**64 - 3, 77, 1_000_000)
    assert np.array_equal(row, reference.gumbel_row(2**64 - 3, 77, 1_000_000))


@given(KEYS, POSITIONS, st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_any_ids_agree_in_any_order(key: int, position: int, ids: list[int]) -> None:
    array = np.array(ids, np.int64)
    noise = gumbel_noise(key, position, array)
    assert noise.dtype == np.float32
    assert np.array_equal(noise, reference.gumbel_noise(key, position, array))
    assert np.array_equal(noise[::-1], gumbel_noise(key, position, array[::-1]))


@given(KEYS, POSITIONS, st.integers(1, 300))
def test_a_row_is_its_tokens(key: int, position: int, size: int) -> None:
    row = gumbel_row(key, position, size)
    assert np.array_equal(row, gumbel_noise(key, position, np.arange(size)))


@given(KEYS, POSITIONS)
def test_the_block_minimum_is_the_largest_noise_of_its_block(key: int, position: int) -> None:
    draws = [block_draw(np.uint64(key), np.uint64(position), np.uint64(b)) for b in range(20)]
    minima = np.array([block_minimum(uniform) for uniform, _ in draws])
    highest = gumbel_row(key, position, 20 * 64).reshape(20, 64).max(axis=1)
    assert np.array_equal(highest, (-np.log(minima)).astype(np.float32))
    for block in range(20):
        assert highest[block] <= noise_ceiling(draws[block][0])


def test_the_noise_is_gumbel_and_its_blocks_are_uncorrelated() -> None:
    """False-alarm rate 1e-4 for each of the three checks; the seed is fixed."""
    row = gumbel_row(1234, 5, 1 << 18).astype(np.float64)
    assert stats.kstest(row, stats.gumbel_r.cdf).pvalue > 1e-4
    uniform = np.exp(-np.exp(-row)).reshape(-1, 64)
    # Correlations of offsets within a block and of neighbouring blocks, 4 standard errors wide.
    limit = stats.norm.isf(0.5e-4 / (64 * 63 / 2)) / np.sqrt(len(uniform))
    correlations = np.corrcoef(uniform, rowvar=False)[np.triu_indices(64, 1)]
    assert np.abs(correlations).max() < limit
    neighbours = np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]
    assert abs(neighbours) < stats.norm.isf(0.5e-4) / np.sqrt(uniform.size)


def test_keys_and_positions_give_different_noise() -> None:
    rows = [gumbel_row(k, p, 640) for k in (0, 1, 2**32, 2**63) for p in (0, 1, 2**31)]
    for index, row in enumerate(rows):
        assert not any(np.any(row == other) for other in rows[:index])


@pytest.mark.parametrize(("key", "position", "ids"), [(-1, 0, [0]), (0, 2**32, [0]), (0, 0, [-1])])
def test_values_out_of_range_are_refused(key: int, position: int, ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"unsigned|negative"):
        gumbel_noise(key, position, ids)


def test_triton_agrees_in_the_interpreter() -> None:
    script = (
        "import numpy as np, torch\n"
        "from lexshard.kernels.noise.reference import gumbel_noise\n"
        "from tests.support.device_noise import device_noise\n"
        "ids = np.random.default_rng(0).integers(0, 2**31, 3000)\n"
        "for key, position in ((0, 0), (2**64 - 1, 2**32 - 1), (12345678901, 7)):\n"
        "    got = device_noise(key, position, torch.from_numpy(ids))\n"
        "    assert np.array_equal(got.numpy(), gumbel_noise(key, position, ids))\n"
    )
    interpret(script)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_agrees_on_the_gpu() -> None:
    """Within one fp32 ulp: a device's float64 logarithm may differ from the host's in its last bit,
    which now and then is the bit that decides how the noise rounds."""
    from tests.support.device_noise import device_noise

    ids = np.arange(1_000_000)
    got = device_noise(99, 3, torch.from_numpy(ids).cuda()).cpu().numpy()
    want = gumbel_noise(99, 3, ids)
    assert (np.abs(got - want) <= np.spacing(np.abs(want))).all()
    assert np.mean(got != want) < 1e-4
