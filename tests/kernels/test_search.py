"""The search never loses the token, whatever the screen says within its error bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable, flatten_adjustments
from lexshard.kernels.penalties import Adjustments, adjust
from lexshard.kernels.search import (
    Estimates,
    Needs,
    block_slack,
    find_candidates,
    find_leaders,
    find_thresholds,
    narrow,
    reference,
)
from lexshard.kernels.search.reference import adjusted_row, compared_values
from lexshard.kernels.search.selection import key_value, kth_largest_key, order_key
from lexshard.kernels.truncate.reference import best_ids
from tests.support.search_cases import (
    answer,
    canonical_row,
    estimates_of,
    random_adjustment,
    random_need,
)


def _check_equal(ours: tuple, expected: tuple) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert np.array_equal(mine, theirs)


def _leading_scores(
    estimates: Estimates, ids: np.ndarray, needs: Needs, adjustments: Adjustments, row: int
) -> np.ndarray:
    """What some tokens of a row lead with, in order: equal estimates are as good as each other."""
    values = adjusted_row(ids, estimates.values[row, ids], adjustments, row)
    return np.sort(compared_values(values, ids, needs, row))


def _search(
    seed: int,
    rows: int,
    size: int,
    flavour: str,
    width: float,
    slack_factor: float = 1.0,
    most: int | None = None,
    adjusted: float = 0.5,
) -> bool:
    """True if all answers from candidates are those of all tokens; checks cpu == reference."""
    random = np.random.default_rng(seed)
    canonical = np.stack([canonical_row(random, size, flavour) for _ in range(rows)])
    estimates = estimates_of(random, canonical, width, slack_factor)
    needs = [random_need(random, size, most, adjusted) for _ in range(rows)]
    flat = flatten_adjustments([need.adjustment for need in needs])
    search = RowTable.of(needs).search()
    best = find_leaders(estimates, size, search, flat)
    leaders, leader_offsets = best.ids, best.offsets
    every = np.arange(size, dtype=np.int32)
    dense = np.stack(
        [
            adjust(every, canonical[row], np.array([0, size]), flatten_adjustments([n.adjustment]))
            for row, n in enumerate(needs)
        ]
    )
    exact = dense[np.repeat(np.arange(rows), np.diff(leader_offsets)), leaders]
    tau = find_thresholds(leaders, exact, leader_offsets, search)
    found = find_candidates(estimates, size, search, flat, tau, best)
    expected_leaders = reference.find_leaders(estimates, size, search, flat)
    assert np.array_equal(leader_offsets, expected_leaders.offsets)
    for row in range(rows):
        own = slice(leader_offsets[row], leader_offsets[row + 1])
        ours = _leading_scores(estimates, leaders[own], search, flat, row)
        theirs = _leading_scores(estimates, expected_leaders.ids[own], search, flat, row)
        assert np.array_equal(ours, theirs)
    assert np.array_equal(tau, reference.find_thresholds(leaders, exact, leader_offsets, search))
    arguments = (estimates, size, search, flat, tau, best)
    expected = reference.find_candidates(*arguments)
    _check_equal(found[:2], expected[:2])
    assert np.all(found.largest >= expected.largest)
    ids, offsets, _ = found
    assert set(leaders.tolist()) <= set(ids.tolist()) or slack_factor < 1
    better = estimates._replace(
        values=canonical[np.repeat(np.arange(rows), np.diff(offsets)), ids],
        hidden_slack=0.1 * estimates.hidden_slack,
    )
    ids, offsets = narrow(better, found.ids, found.offsets, search, flat, tau)
    _check_equal(
        (ids, offsets),
        reference.narrow(better, found.ids, found.offsets, search, flat, tau),
    )
    equal = True
    for row, need in enumerate(needs):
        kept = ids[offsets[row] : offsets[row + 1]]
        equal &= answer(need, kept, dense[row, kept]) == answer(need, every, dense[row])
    return equal


@settings(max_examples=300)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 400),
    st.sampled_from(["plain", "ties", "zero", "huge", "duplicates"]),
    st.sampled_from([0.0, 1e-5, 0.01, 0.3]),
)
def test_the_answer_is_always_among_the_candidates(
    seed: int, rows: int, size: int, flavour: str, width: float
) -> None:
    assert _search(seed, rows, size, flavour, width)


@given(
    st.integers(0, 2**32),
    st.integers(1000, 9000),
    st.sampled_from(["plain", "ties", "duplicates"]),
    st.sampled_from([0.0, 1e-5, 0.01]),
    st.integers(1, 60),
)
def test_the_answer_survives_processors_in_many_blocks(
    seed: int, size: int, flavour: str, width: float, most: int
) -> None:
    """Histories, biases, bans and allow lists where most blocks are excluded by their ceiling."""
    assert _search(seed, 3, size, flavour, width, most=most, adjusted=1.0)


@pytest.mark.parametrize("slack_factor", [0.0, 0.5])
@pytest.mark.parametrize(("size", "adjusted"), [(300, 0.5), (2000, 1.0)])
def test_a_wrong_slack_is_noticed(slack_factor: float, size: int, adjusted: float) -> None:
    """The check above has teeth: with half the slack it loses tokens."""
    lost = sum(
        not _search(seed, 4, size, "plain", 0.05, slack_factor, adjusted=adjusted)
        for seed in range(50)
    )
    assert lost > 10


def test_a_history_travels_by_reference() -> None:
    """What a step hands to the kernels is as large for a long history as for a short one."""
    sizes = []
    for length in (100, 32_000):
        tables = np.zeros((1, 40_000), np.int32)
        tables[0, :length] = 2
        adjustment = replace(
            random_adjustment(np.random.default_rng(5), 2), tables=tables, table=0, mask=None
        )
        flat = flatten_adjustments([adjustment, None, adjustment])
        assert flat.tables is adjustment.tables
        sizes.append(sum(field.nbytes for field in flat) - flat.tables.nbytes)
    assert sizes[0] == sizes[1]


def test_few_tokens_remain() -> None:
    """At an error of 1e-4 a search keeps what it must, and little else."""
    random = np.random.default_rng(0)
    canonical = (3 * random.standard_normal((3, 50_000))).astype(np.float32)
    base = Need(kind="top1", key=3, position=9)
    needs = [base, replace(base, inverse_temperature=1.0), replace(base, kind="topk", k=50)]
    search, none = RowTable.of(needs).search(), flatten_adjustments([None] * 3)
    zero = np.zeros((2, 50_000), np.float32)
    estimates = Estimates(canonical, zero, np.tile([0.0, 0.0, 1e-4], (3, 1)), block_slack(zero))
    best = find_leaders(estimates, 50_000, search, none)
    ids, offsets = best.ids, best.offsets
    exact = canonical[np.repeat(np.arange(3), np.diff(offsets)), ids]
    tau = find_thresholds(ids, exact, offsets, search)
    _, offsets, _ = find_candidates(estimates, 50_000, search, none, tau, best)
    assert np.all(np.diff(offsets) <= [2, 3, 52])


def test_a_search_for_no_token_is_refused() -> None:
    zero = np.zeros((2, 100), np.float32)
    estimates = Estimates(zero[:1], zero, np.zeros((1, 3)), block_slack(zero))
    search = RowTable.of([Need("topk", k=1)]).search()._replace(k=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="at least 1"):
        find_leaders(estimates, 100, search, flatten_adjustments([None]))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 300))
def test_shards_share_thresholds(seed: int, rows: int, size: int) -> None:
    """The larger threshold of two halves never loses a token of the whole (greedy and top-k)."""
    random = np.random.default_rng(seed)
    canonical = (4 * random.standard_normal((rows, size))).astype(np.float32).round(1)
    estimate = canonical + random.uniform(-0.049, 0.049, canonical.shape).astype(np.float32)
    k = int(random.integers(1, size + 1))
    needs = RowTable.of([Need(kind="topk", k=k)] * rows).search()
    none = flatten_adjustments([None] * rows)
    cut = int(random.integers(1, size))
    taus, halves = [], []
    for part in (slice(0, cut), slice(cut, size)):
        own = np.ascontiguousarray(canonical[:, part])
        zero = np.zeros((2, own.shape[1]), np.float32)
        half = Estimates(
            np.ascontiguousarray(estimate[:, part]),
            zero,
            np.tile([0.0, 0.0, 0.05], (rows, 1)),
            block_slack(zero),
        )
        best = find_leaders(half, own.shape[1], needs, none)
        ids, offsets = best.ids, best.offsets
        exact = own[np.repeat(np.arange(rows), np.diff(offsets)), ids]
        taus.append(find_thresholds(ids, exact, offsets, needs))
        halves.append((half, best))
    tau = np.maximum(*taus)
    found = [
        find_candidates(half, half.values.shape[1], needs, none, tau, best) for half, best in halves
    ]
    for row in range(rows):
        kept = np.concatenate(
            [
                ids[offsets[row] : offsets[row + 1]] + start
                for (ids, offsets, _), start in zip(found, (0, cut), strict=True)
            ]
        )
        assert set(best_ids(canonical[row], k).tolist()) <= set(kept.tolist())


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_subnormal=True), min_size=1, max_size=99),
    st.data(),
)
def test_the_kth_largest_value(values: list[float], data: st.DataObject) -> None:
    array = np.array(values, np.float32)
    k = data.draw(st.integers(1, len(values)))
    keys = np.array([order_key(value) for value in array], np.int64)
    assert key_value(kth_largest_key(keys, len(keys), k)) == np.sort(array)[::-1][k - 1]
