"""The search never loses the token, whatever the screen says within its error bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import Adjustment, Need
from actors.shard import flatten_adjustments, flatten_needs
from kernels.penalties import adjust
from kernels.search import find_candidates, find_thresholds
from kernels.search.selection import key_value, kth_largest_key, order_key
from kernels.truncate.reference import best_ids

settings.register_profile("search", deadline=None)
settings.load_profile("search")


def _canonical(random: np.random.Generator, size: int, flavour: str) -> np.ndarray:
    logits = (4 * random.standard_normal(size)).astype(np.float32)
    if flavour == "ties":
        return logits.round(0)
    if flavour == "zero":
        return np.zeros(size, np.float32)
    if flavour == "huge":
        return logits * np.float32(1e30)
    if flavour == "duplicates":
        return logits[random.integers(0, max(size // 3, 1), size)]
    return logits


def _adjustment(random: np.random.Generator, size: int) -> Adjustment:
    seen = np.flatnonzero(random.random(size) < 0.3).astype(np.int32)
    bias = np.flatnonzero(random.random(size) < 0.1).astype(np.int32)
    return Adjustment(
        repetition=float(random.choice([1.0, 1.3, 0.7])),
        frequency=float(random.choice([0.0, 0.5, -0.3])),
        presence=float(random.choice([0.0, 0.9, -1.1])),
        seen_ids=seen,
        output_counts=random.integers(0, 4, len(seen)).astype(np.int32),
        bias_ids=bias,
        bias_values=random.choice([-100.0, 0.3, 5.0], len(bias)).astype(np.float32),
        banned=np.flatnonzero(random.random(size) < 0.05).astype(np.int32),
        allowed=np.flatnonzero(random.random(size) < 0.2).astype(np.int32)
        if random.random() < 0.2
        else None,
    )


def _need(random: np.random.Generator, size: int) -> Need:
    kind = random.choice(["greedy", "top1", "topk", "minp"])
    return Need(
        kind="top1" if kind == "greedy" else kind,
        k=int(random.integers(1, size + 3)),
        min_p=float(random.choice([1e-6, 0.05, 0.5, 1.0])),
        key=int(random.integers(0, 2**64, dtype=np.uint64)),
        position=int(random.integers(0, 1000)),
        inverse_temperature=0.0
        if kind == "greedy"
        else float(np.float32(random.choice([0.5, 1.0, 1 / 0.7, 20.0]))),
        adjustment=_adjustment(random, size) if random.random() < 0.5 else None,
    )


def _answer(need: Need, ids: np.ndarray, logits: np.ndarray) -> list[int]:
    """The tokens that a need is about, in order, by brute force over the given ones."""
    from kernels.noise import gumbel_noise

    ids, logits = ids[logits > -np.inf], logits[logits > -np.inf]
    if not len(ids):
        return []
    scaled = logits.astype(np.float64) * need.inverse_temperature
    if need.kind == "topk":
        return ids[best_ids(logits, need.k)].tolist()
    if need.kind == "minp":
        return ids[scaled >= scaled.max() + np.log(need.min_p)].tolist()
    if need.inverse_temperature == 0:
        return [int(ids[np.argmax(logits)])]
    noise = gumbel_noise(need.key, need.position, ids, implementation="reference")
    return [int(ids[np.argmax(scaled + noise)])]


def _search(
    seed: int, rows: int, size: int, flavour: str, width: float, slack_factor: float = 1.0
) -> bool:
    """True if all answers from candidates are those of all tokens; checks cpu == reference."""
    random = np.random.default_rng(seed)
    canonical = np.stack([_canonical(random, size, flavour) for _ in range(rows)])
    slack = width * np.abs(canonical).max(axis=1).astype(np.float64) * random.random(rows)
    padded = np.full((rows, size + int(random.integers(0, 70))), 1e38, np.float32)
    error = random.choice([-1.0, 1.0, 0.3], (rows, size)) * slack[:, None]
    padded[:, :size] = canonical + error * (1 - 1e-6)
    slack = slack + np.abs(canonical).max(axis=1) * 2.0**-22
    needs = [_need(random, size) for _ in range(rows)]
    flat = flatten_adjustments([need.adjustment for need in needs])
    search = flatten_needs(needs)
    arguments = (padded, slack_factor * slack, size, search, flat)
    tau = find_thresholds(*arguments)
    ids, offsets = find_candidates(*arguments, tau)
    expected_tau = find_thresholds(*arguments, implementation="reference")
    expected = find_candidates(*arguments, expected_tau, implementation="reference")
    assert np.array_equal(tau, expected_tau)
    assert np.array_equal(ids, expected[0])
    assert np.array_equal(offsets, expected[1])
    every = np.arange(size, dtype=np.int32)
    equal = True
    for row, need in enumerate(needs):
        one = flatten_adjustments([need.adjustment])
        dense = adjust(every, canonical[row], np.array([0, size]), one)
        found = ids[offsets[row] : offsets[row + 1]]
        equal &= _answer(need, found, dense[found]) == _answer(need, every, dense)
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


@pytest.mark.parametrize("slack_factor", [0.0, -1.0])
def test_a_wrong_slack_is_noticed(slack_factor: float) -> None:
    """The check above has teeth: with too small a slack it loses tokens."""
    lost = sum(not _search(seed, 4, 300, "plain", 0.05, slack_factor) for seed in range(50))
    assert lost > 10


def test_few_tokens_remain() -> None:
    """At an error of 1e-4 a search keeps what it must, and little else."""
    random = np.random.default_rng(0)
    estimate = (3 * random.standard_normal((3, 50_000))).astype(np.float32)
    base = Need(kind="top1", key=3, position=9)
    needs = [base, replace(base, inverse_temperature=1.0), replace(base, kind="topk", k=50)]
    arguments = (
        estimate,
        np.full(3, 1e-4),
        50_000,
        flatten_needs(needs),
        flatten_adjustments([None] * 3),
    )
    _, offsets = find_candidates(*arguments, find_thresholds(*arguments))
    assert np.all(np.diff(offsets) <= [2, 3, 52])


def test_an_unknown_error_keeps_everything() -> None:
    arguments = (
        np.zeros((1, 100), np.float32),
        np.array([np.inf]),
        90,
        flatten_needs([Need(kind="topk", k=1)]),
        flatten_adjustments([None]),
    )
    ids, _ = find_candidates(*arguments, find_thresholds(*arguments))
    assert ids.tolist() == list(range(90))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 300))
def test_shards_share_thresholds(seed: int, rows: int, size: int) -> None:
    """The larger threshold of two halves never loses a token of the whole (greedy and top-k)."""
    random = np.random.default_rng(seed)
    canonical = (4 * random.standard_normal((rows, size))).astype(np.float32).round(1)
    slack = np.full(rows, 0.05)
    estimate = canonical + random.uniform(-0.049, 0.049, canonical.shape).astype(np.float32)
    k = int(random.integers(1, size + 1))
    needs = flatten_needs([Need(kind="topk", k=k)] * rows)
    none = flatten_adjustments([None] * rows)
    cut = int(random.integers(1, size))
    halves = [np.ascontiguousarray(estimate[:, :cut]), np.ascontiguousarray(estimate[:, cut:])]
    taus = [find_thresholds(half, slack, half.shape[1], needs, none) for half in halves]
    tau = np.maximum(*taus)
    found = [find_candidates(half, slack, half.shape[1], needs, none, tau) for half in halves]
    for row in range(rows):
        kept = np.concatenate(
            [
                ids[offsets[row] : offsets[row + 1]] + start
                for (ids, offsets), start in zip(found, (0, cut), strict=True)
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
