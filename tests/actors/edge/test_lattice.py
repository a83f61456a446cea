"""A quantised distribution as bits: all that it takes, and back to the very same."""

from __future__ import annotations

import math
import time
import timeit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.edge.lattice import Lattice, decode, encode, lattice_bits


@st.composite
def lattices(draw_one: st.DrawFn) -> tuple[Lattice, int]:
    """A lattice and the size of its vocabulary: few tokens, most, all; piled up at either end."""
    size = draw_one(st.integers(1, 40))
    vocabulary_size = draw_one(st.sampled_from((size, size + 1, 2 * size + 1, 500, 262_144)))
    start = draw_one(st.integers(0, vocabulary_size - size))
    spread = draw_one(st.integers(0, vocabulary_size - size - start))
    steps = sorted(draw_one(st.lists(st.integers(0, spread), min_size=size, max_size=size)))
    ids = np.arange(start, start + size, dtype=np.int32) + np.array(steps, np.int32)
    counts = draw_one(
        st.lists(st.sampled_from((0, 0, 1, 2, 100, 5_000)), min_size=size, max_size=size)
    )
    counts[draw_one(st.integers(0, size - 1))] += 1
    return Lattice(ids, np.array(counts, np.int64)), vocabulary_size


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(lattices())
def test_what_is_decoded_is_what_was_encoded(case: tuple[Lattice, int]) -> None:
    """The members are those that bisection finds, and bits are within one of the formula."""
    lattice, vocabulary_size = case
    size, resolution = len(lattice.ids), int(lattice.counts.sum())
    number = encode(lattice, vocabulary_size)
    found = decode(number, vocabulary_size, size, resolution)
    assert found.ids.tolist() == lattice.ids.tolist()
    assert found.counts.tolist() == lattice.counts.tolist()
    told = found.ids.tolist()
    if 2 * size > vocabulary_size:  # the others, which are fewer
        told = sorted({*range(vocabulary_size)} - {*told})
    place = number // math.comb(resolution + size - 1, size - 1)
    assert told == bisected(place, len(told), vocabulary_size)
    bits = lattice_bits(vocabulary_size, size, resolution)
    assert number.bit_length() <= bits
    formula = math.log2(math.comb(vocabulary_size, size))
    formula += math.log2(math.comb(resolution + size - 1, size - 1))
    assert formula - 1e-6 <= bits < formula + 1 + 1e-6


def test_every_lattice_has_one_number_and_every_number_one_lattice() -> None:
    vocabulary_size, size, resolution = 6, 3, 4
    ways = math.comb(6, 3) * math.comb(6, 2)
    for number in range(ways):
        lattice = decode(number, vocabulary_size, size, resolution)
        assert encode(lattice, vocabulary_size) == number
        assert lattice.counts.sum() == resolution
    with pytest.raises(ValueError, match="no lattice"):
        decode(ways, vocabulary_size, size, resolution)


@pytest.mark.parametrize("size", [2, 1_400, 1_600, 2_999])
def test_thousands_of_members_are_found_as_well(size: int) -> None:
    ways = math.comb(3_000, size) * math.comb(2_000 + size - 1, size - 1)
    for number in (0, ways // 3, ways - 1):
        assert encode(decode(number, 3_000, size, 2_000), 3_000) == number


def bisected(place: int, size: int, end: int) -> list[int]:
    """The subset of that place, by the definition: each member the largest with C(member, left)
    at most what is left of it."""
    members: list[int] = []
    for left in range(size, 0, -1):
        low, high = left - 1, end
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if math.comb(middle, left) <= place else (low, middle)
        place -= math.comb(low, left)
        members.append(low)
        end = low
    return members[::-1]


@pytest.mark.parametrize(
    ("ids", "counts"),
    [
        ((2, 1), (1, 1)),
        ((1, 1), (1, 1)),
        ((-1, 1), (1, 1)),
        ((1, 9), (1, 1)),
        ((), ()),
        ((1, 2), (1,)),
        ((1, 2), (3, -1)),
        ((1, 2), (0, 0)),
    ],
)
def test_what_is_no_lattice_is_refused(ids: tuple[int, ...], counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        encode(Lattice(np.array(ids, np.int32), np.array(counts, np.int64)), 9)


def test_the_paper_s_example_takes_498_bits() -> None:
    """K with it."""
    assert lattice_bits(50_257, 32, 100) + math.ceil(math.log2(50_257)) == 498


@pytest.mark.slow
def test_a_million_distributions_come_back() -> None:
    """Random sizes, vocabularies and resolutions, few tokens to many."""
    random = np.random.default_rng(3)
    sizes = (50, 1_000, 50_257, 262_144)
    for _ in range(1_000_000):
        vocabulary_size = sizes[random.integers(4)]
        some = random.integers(0, vocabulary_size, min(int(random.geometric(0.15)), 60))
        ids = np.unique(some).astype(np.int32)
        resolution = (1, 10, 100, 1_000)[random.integers(4)]
        counts = np.bincount(random.integers(0, len(ids), resolution), minlength=len(ids))
        lattice = Lattice(ids, counts)
        found = decode(encode(lattice, vocabulary_size), vocabulary_size, len(ids), resolution)
        assert found.ids.tolist() == ids.tolist()
        assert found.counts.tolist() == counts.tolist()


@pytest.mark.timed
def test_coding_32_of_262144_tokens_takes_milliseconds_at_most() -> None:
    """32 tokens there and back: 0.2 ms when it was measured; a busy machine has room."""
    random = np.random.default_rng(1)
    ids = np.sort(random.choice(262_144, 32, replace=False)).astype(np.int32)
    lattice = Lattice(ids, random.multinomial(100, np.full(32, 1 / 32)).astype(np.int64))

    def there_and_back() -> None:
        decode(encode(lattice, 262_144), 262_144, 32, 100)

    assert min(timeit.repeat(there_and_back, number=1, repeat=20)) < 0.005


@pytest.mark.timed
def test_a_code_of_half_a_vocabulary_is_read_in_no_time() -> None:
    """15,800 bits, about as many as a frame may say of one guess: with a binomial of its own for
    each of 7,000 members they took ten seconds."""
    ways = math.comb(14_000, 7_000) * math.comb(300 + 7_000 - 1, 7_000 - 1)
    started = time.perf_counter()
    decode(ways // 3, 14_000, 7_000, 300)
    assert time.perf_counter() - started < 1.0
