"""A quantised distribution as bits: all that it takes, and back to the very same."""

from __future__ import annotations

import math
import time
import timeit
from itertools import combinations, product

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


def check_comes_back(lattice: Lattice, vocabulary_size: int) -> int:
    """Its number, of which the same is drawn and tested: what counts nothing is not told."""
    number = encode(lattice, vocabulary_size)
    size, resolution = len(lattice.ids), int(lattice.counts.sum())
    found = decode(number, vocabulary_size, size, resolution)
    assert found.ids.tolist() == lattice.likely.tolist()
    assert found.counts.tolist() == lattice.counts[lattice.counts > 0].tolist()
    return number


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(lattices())
def test_what_is_decoded_is_what_was_encoded(case: tuple[Lattice, int]) -> None:
    """The members are those that bisection finds, and bits are within one of the formula."""
    lattice, vocabulary_size = case
    size, resolution = len(lattice.ids), int(lattice.counts.sum())
    number = check_comes_back(lattice, vocabulary_size)
    told = lattice.ids.tolist()
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
    """Few tokens and most, with fewer parts than tokens and with more."""
    for size, resolution in ((3, 4), (5, 2), (6, 3), (2, 5)):
        shares = [each for each in product(range(6), repeat=size) if sum(each) == resolution]
        numbers = [
            check_comes_back(Lattice(np.array(ids, np.int32), np.array(counts, np.int64)), 6)
            for ids in combinations(range(6), size)
            for counts in shares
        ]
        ways = math.comb(6, size) * math.comb(resolution + size - 1, size - 1)
        assert sorted(numbers) == list(range(ways))
        with pytest.raises(ValueError, match="no lattice"):
            decode(ways, 6, size, resolution)


@pytest.mark.parametrize("size", [2, 1_400, 1_600, 2_999])
def test_thousands_of_members_are_found_as_well(size: int) -> None:
    random = np.random.default_rng(size)
    for shares in (np.full(size, 1 / size), np.eye(1, size)[0], np.eye(1, size, size - 1)[0]):
        ids = np.sort(random.choice(3_000, size, replace=False)).astype(np.int32)
        check_comes_back(Lattice(ids, random.multinomial(2_000, shares)), 3_000)


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
        check_comes_back(Lattice(ids, counts), vocabulary_size)


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
