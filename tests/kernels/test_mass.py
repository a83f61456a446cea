"""The mass outside of a list of tokens is within its bounds, and plans lead to certificates."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lexshard.actors.states.row_table import RowTable, flatten_adjustments
from lexshard.kernels import mass
from lexshard.kernels.mass import (
    Logits,
    Outline,
    block_ceilings,
    heaviest_tokens,
    outline,
    outside_mass,
    plan,
    reference,
    stands,
)
from lexshard.kernels.penalties import adjust
from lexshard.kernels.search import find_leaders
from lexshard.kernels.truncate.reference import truncate
from tests.support.search_cases import canonical_row, estimates_of, random_need


def _outside_mass_holds(
    seed: int, rows: int, size: int, flavour: str, width: float, slack_factor: float = 1.0
) -> bool:
    random = np.random.default_rng(seed)
    canonical = np.stack([canonical_row(random, size, flavour) for _ in range(rows)])
    estimates = estimates_of(random, canonical, width, slack_factor)
    needs = [replace(random_need(random, size), inverse_temperature=0.5) for _ in range(rows)]
    flat = flatten_adjustments([need.adjustment for need in needs])
    search = RowTable.of(needs).search()
    listed = [np.flatnonzero(random.random(size) < 0.3).astype(np.int32) for _ in range(rows)]
    offsets = np.cumsum([0, *map(len, listed)])
    arguments = (estimates, size, search, flat, np.concatenate(listed), offsets)
    found = outside_mass(*arguments)
    expected = reference.outside_mass(*arguments)
    assert np.allclose(found, expected, rtol=1e-12, atol=1e-12)
    holds = True
    every = np.arange(size, dtype=np.int32)
    for row, need in enumerate(needs):
        one = flatten_adjustments([need.adjustment])
        dense = adjust(every, canonical[row], np.array([0, size]), one).astype(np.float64)
        outside = np.delete(dense, listed[row])
        log_mass = np.logaddexp.reduce(outside * 0.5) if len(outside) else -np.inf
        holds &= bool(found.log_lower[row] <= log_mass <= found.log_upper[row])
        holds &= bool(outside.max(initial=-np.inf) <= found.largest[row])
    return holds


@given(
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 200),
    st.sampled_from(["plain", "ties", "zero", "duplicates"]),
    st.sampled_from([0.0, 1e-5, 0.3]),
)
def test_the_outside_mass_is_within_its_bounds(
    seed: int, rows: int, size: int, flavour: str, width: float
) -> None:
    assert _outside_mass_holds(seed, rows, size, flavour, width)


def test_a_wrong_mass_is_noticed() -> None:
    assert sum(not _outside_mass_holds(seed, 3, 200, "plain", 0.3, 0.5) for seed in range(50)) > 10


def _bounds_tell_truly(
    seed: int, size: int, flavour: str, width: float, top_p: float, slack_factor: float = 1.0
) -> bool | None:
    """Whether what bounds tell of a row's draw and its nucleus is so; None where they do not
    tell."""
    random = np.random.default_rng(seed)
    canonical = canonical_row(random, size, flavour)
    estimates = estimates_of(random, canonical[None], width, slack_factor)
    scale = float(np.float32(random.choice([0.2, 0.5, 1.0, 1.7])))
    need = replace(random_need(random, size), kind="top1", inverse_temperature=scale)
    search, flat = RowTable.of([need]).search(), flatten_adjustments([need.adjustment])
    every = np.arange(size, dtype=np.int32)
    logits = adjust(every, canonical, np.array([0, size]), flat)
    place = mass.drawn(search, Logits(every, logits))
    assert place == reference.drawn(search, Logits(every, logits))
    if place < 0:
        assert logits.max() == -np.inf
        return None
    _, upper = mass.adjusted_bounds(estimates, size, flat)
    largest = float(upper.max()) + float(random.choice([0.0, 0.25]))
    best = find_leaders(estimates, size, search, flat)
    ceilings = block_ceilings(estimates, flat, best.maxima[0])
    for block, ceiling in enumerate(ceilings):
        assert upper[64 * block : 64 * block + 64].max() <= ceiling
    heavy = heaviest_tokens(estimates, flat, ceilings)
    assert len(heavy) <= size // reference.HEAVY_SHARE
    if len(heavy):
        assert upper[heavy].min() >= np.delete(upper, heavy).max(initial=-np.inf)
    nothing, known = Logits(every[:0], logits[:0]), Logits(heavy, logits[heavy])
    token = Logits(every, logits).at(place)
    arguments = (estimates, search, flat, top_p, token, largest)
    ours = (*arguments, ceilings)
    kept = truncate(logits, scale, 0, top_p, -math.inf)
    told = []
    for inside in (True, False):
        alone, more = (stands(*ours, each, inside=inside) for each in (nothing, known))
        if slack_factor == 1.0:
            assert more >= alone
        assert more == reference.stands(*arguments, known, inside=inside)
        if more:
            told.append(bool(kept[place]) == inside)
    return all(told) if told else None


@given(
    st.integers(0, 2**32),
    st.one_of(st.integers(1, 200), st.integers(600, 1500)),
    st.sampled_from(["plain", "ties", "zero", "duplicates", "huge"]),
    st.sampled_from([0.0, 1e-5, 0.02, 0.3]),
    st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.999]),
)
@example(1482, 1482, "zero", 0.0, 0.01)  # a thousand equal bounds, and few larger ones behind them
def test_what_bounds_tell_of_a_draw_and_its_nucleus_is_so(
    seed: int, size: int, flavour: str, width: float, top_p: float
) -> None:
    assert _bounds_tell_truly(seed, size, flavour, width, top_p) is not False


def test_bounds_tell_of_most_draws_and_wrong_ones_are_noticed() -> None:
    for top_p in (0.9, 0.1):  # inside nearly always, and outside
        told = [_bounds_tell_truly(seed, 900, "plain", 0.02, top_p) for seed in range(100)]
        assert told.count(True) > 70
        assert False not in told
    wrong = [_bounds_tell_truly(seed, 900, "plain", 0.3, 0.8, 0.1) for seed in range(300)]
    assert wrong.count(False) > 3


@pytest.mark.slow
@given(
    st.integers(0, 2**32),
    st.integers(1, 300),
    st.sampled_from(["plain", "ties", "zero", "duplicates", "huge"]),
    st.sampled_from([0.0, 1e-5, 0.3]),
    st.booleans(),
)
def test_outlines_of_parts_add_up_and_plans_agree_with_the_reference(
    seed: int, size: int, flavour: str, width: float, epsilon: bool
) -> None:
    """Whoever holds which tokens: the same bins, and a plan is one for all of them together."""
    random = np.random.default_rng(seed)
    canonical = canonical_row(random, size, flavour)[None]
    estimates = estimates_of(random, canonical, width, 1.0)
    need = replace(random_need(random, size), inverse_temperature=0.5)
    owner = random.integers(0, 3, size)

    def outlines(owners: list[int], module: ModuleType) -> list[Outline | None]:
        found = []
        for each in owners:
            own = owner == each if each >= 0 else np.ones(size, np.bool_)
            row = np.flatnonzero(own)
            part = estimates._replace(
                values=estimates.values[:, row], row_slack=estimates.row_slack[:, row]
            )
            one = flatten_adjustments([None if each >= 0 else need.adjustment])
            search = RowTable.of([need]).search()
            found += module.outline(part, len(row), search, one)
        return found

    for owners in ([-1], [0, 1, 2]):
        ours, expected = outlines(owners, mass), outlines(owners, reference)
        for own, other in zip(ours, expected, strict=True):
            if own is None or other is None:
                assert own is other
                continue
            assert own.counts.tolist() == other.counts.tolist()
            assert own.top == other.top
            assert np.allclose(own.errors, other.errors, rtol=1e-5)
            assert math.isclose(own.widest, other.widest, rel_tol=1e-5)
    whole = outline(estimates, size, RowTable.of([need]).search(), flatten_adjustments([None]))
    parts = outlines([0, 1, 2], mass)
    assert (whole[0] is None) == any(part is None for part in parts) == (flavour == "huge")
    if whole[0] is None:
        return
    known = [part for part in parts if part is not None]
    top_p, allowed = float(random.uniform(0.05, 0.99)), 0.1 if epsilon else 0.0
    lowest, count = plan(known, top_p, allowed)
    assert sum(part.count_from(lowest) for part in known) == count
    # The order of sums decides at edges only: the plans are a bin apart at most.
    for other in (
        plan([whole[0]], top_p, allowed)[0],
        reference.plan(known, top_p, allowed)[0],
    ):
        assert abs(other - lowest) <= 1


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_a_plan_holds_the_nucleus(top_p: float) -> None:
    random = np.random.default_rng(1)
    canonical = (3 * random.standard_normal((1, 20_000))).astype(np.float32)
    estimates = estimates_of(random, canonical, 1e-6, 1.0)
    need = RowTable.of(
        [replace(random_need(random, 10), kind="nucleus", inverse_temperature=1.0)]
    ).search()
    [found] = outline(estimates, 20_000, need, flatten_adjustments([None]))
    assert found is not None
    count = plan([found], top_p, 0.0)[1]
    masses = np.sort(np.exp(canonical[0].astype(np.float64)))[::-1]
    nucleus = int(np.searchsorted(np.cumsum(masses), top_p * masses.sum())) + 1
    assert nucleus <= count < 4 * nucleus + 100
