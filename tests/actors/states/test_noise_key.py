"""Every choice of every seed draws with a key of its own, and sweeps over seeds are independent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.noise_key import noise_key
from lexshard.actors.states.sequence_state import SequenceState

SEEDS = st.integers(-(2**63), 2**64 - 1)
CHOICES = st.integers(1, 2**20)
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SIZE = 2**64


def key_of(seed: int, choice: int) -> int:
    """What a sequence draws with, as its sampler has it."""
    request = Request("r", choice, (1,), SamplingParameters(seed=seed))
    return SequenceState(request, 100, (0,)).key


def unshift(z: int, bits: int) -> int:
    """The x with ``x ^ (x >> bits) == z``."""
    x = z
    for _ in range(64 // bits):
        x = z ^ (x >> bits)
    return x


def unmix(z: int) -> int:
    """The inverse of SplitMix64's finaliser, step by step from its end."""
    z = unshift(z, 31) * pow(SECOND, -1, SIZE) % SIZE
    z = unshift(z, 27) * pow(FIRST, -1, SIZE) % SIZE
    return unshift(z, 30)


@given(SEEDS)
def test_the_first_choice_draws_with_the_seed_itself(seed: int) -> None:
    assert key_of(seed, 0) == seed % SIZE


def test_choices_of_seed_0_are_the_published_stream() -> None:
    """SplitMix64 from state 0, as its other implementations print it."""
    assert [key_of(0, choice) for choice in range(1, 6)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
        0x1B39896A51A8749B,
    ]


@given(SEEDS, CHOICES)
def test_a_seed_can_be_computed_from_the_key_of_any_choice(seed: int, choice: int) -> None:
    """So, for every choice, seeds and keys correspond one to one."""
    assert unmix((unmix(noise_key(seed, choice)) - choice * STEP) % SIZE) == seed % SIZE


def keys(seeds: np.ndarray, choice: int) -> np.ndarray:
    """The keys of many seeds at once, written down a second time."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
        return z ^ (z >> np.uint64(31))

    return seeds if choice == 0 else mix(mix(seeds) + np.uint64(choice * STEP % SIZE))


@pytest.mark.parametrize("first", [0, 2**32 - 5_000, 2**63 - 5_000, SIZE - 10_000])
def test_sweeps_over_seeds_and_choices_share_no_key(first: int) -> None:
    """10,000 neighbouring seeds with 128 choices each: 1.28 million different keys."""
    seeds = np.arange(10_000, dtype=np.uint64) + np.uint64(first)
    grid = np.stack([keys(seeds, choice) for choice in range(128)])
    assert len(np.unique(grid)) == grid.size
    for seed, choice in ((0, 0), (1, 1), (4_999, 64), (9_999, 127)):
        assert noise_key(first + seed, choice) == int(grid[choice, seed])
