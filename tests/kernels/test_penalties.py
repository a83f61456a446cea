"""Processors: the stated order in fp32, and monotone, so that they carry bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.states.need import Adjustment
from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.kernels.penalties import adjust, reference, select_row
from lexshard.kernels.penalties.cpu import (
    adjust_block,
    adjust_token,
    most_repeated,
    penalise,
    raised,
)
from tests.support.search_cases import random_adjustment


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 200))
def test_cpu_equals_reference(seed: int, rows: int, size: int) -> None:
    random = np.random.default_rng(seed)
    flat = flatten_adjustments(
        [None if random.random() < 0.2 else random_adjustment(random, size) for _ in range(rows)]
    )
    chosen = [np.flatnonzero(random.random(size) < random.random()) for _ in range(rows)]
    ids = np.concatenate(chosen).astype(np.int32)
    offsets = np.cumsum([0, *(len(c) for c in chosen)])
    logits = (5 * random.standard_normal(len(ids))).astype(np.float32)
    got = adjust(ids, logits, offsets, flat)
    assert np.array_equal(got, reference.adjust(ids, logits, offsets, flat))


def test_the_stated_order_in_fp32() -> None:
    adjustment = Adjustment(
        repetition=1.5,
        frequency=0.25,
        presence=0.125,
        tables=np.array([[9, 9, 9, 9, 9], [0, 1, 3, 2, 0]], np.int32),
        table=1,
        bias_ids=np.array([2, 3], np.int32),
        bias_values=np.array([-4.0, 1.0], np.float32),
        banned=np.array([4], np.int32),
        mask=None,
    )
    logits = np.array([3, 3, 3, 3, 3], np.float32)
    got = adjust(
        np.arange(5, dtype=np.int32), logits, np.array([0, 5]), flatten_adjustments([adjustment])
    )
    fp32 = np.float32
    expected = [
        fp32(3),
        fp32(3) / fp32(1.5),  # prompt only: repetition alone
        fp32(-1) * fp32(1.5) - fp32(0.5) - fp32(0.125),  # negative after its bias: multiplied
        fp32(4) / fp32(1.5) - fp32(0.25) - fp32(0.125),
        fp32(-np.inf),
    ]
    assert got.tolist() == [float(value) for value in expected]


@given(st.integers(0, 2**32), st.integers(1, 150), st.floats(0, 2))
def test_bounds_stay_bounds(seed: int, size: int, width: float) -> None:
    """Adjusted bounds enclose every adjusted logit between the raw bounds, with no extra room."""
    random = np.random.default_rng(seed)
    flat = flatten_adjustments([random_adjustment(random, size)])
    ids, offsets = np.arange(size, dtype=np.int32), np.array([0, size])
    center = (5 * random.standard_normal(size)).astype(np.float32)
    shift = np.float32(width)
    low, high = center - shift, center + shift
    adjust_block(low, 0, 0, flat)
    adjust_block(high, 0, 0, flat)
    between = np.clip(
        center + random.uniform(-1, 1, size).astype(np.float32) * shift,
        center - shift,
        center + shift,
    )
    inside = adjust(ids, between, offsets, flat)
    assert np.all(low <= inside)
    assert np.all(inside <= high)
    assert np.array_equal(low, adjust(ids, center - shift, offsets, flat))


@given(st.integers(0, 2**32), st.integers(1, 300), st.data())
def test_tokens_and_blocks_are_adjusted_as_candidates_are(
    seed: int, size: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    adjustments = [random_adjustment(random, size) for _ in range(2)]
    flat = flatten_adjustments([None, *adjustments])
    logits = (5 * random.standard_normal(size)).astype(np.float32)
    ids = np.arange(size, dtype=np.int32)
    first = data.draw(st.integers(0, size - 1))
    block = logits[first : data.draw(st.integers(first + 1, size))].copy()
    stop = first + len(block)
    for row in (1, 2):
        expected = reference.adjust(ids, logits, np.array([0, size]), select_row(flat, row))
        assert [adjust_token(logits[token], token, row, flat) for token in (first, stop - 1)] == [
            expected[first],
            expected[stop - 1],
        ]
        adjusted = block.copy()
        adjust_block(adjusted, first, row, flat)
        assert np.array_equal(adjusted, expected[first:stop])


@given(st.integers(0, 2**32), st.integers(1, 99), st.floats(-9, 9))
def test_the_most_that_penalties_raise(seed: int, size: int, logit: float) -> None:
    """`raised` bounds what penalties make of every token, and some count of the row reaches it."""
    random = np.random.default_rng(seed)
    flat = flatten_adjustments([random_adjustment(random, size)])
    most = most_repeated(0, flat)
    got = raised(np.float32(logit), 0, flat, most)
    if flat.table[0] < 0:
        assert got == np.float32(logit)
        return
    table = flat.tables[flat.table[0]]
    assert most >= table.max() - 1 or flat.frequency[0] >= 0
    penalties = flat.repetition[0], flat.frequency[0], flat.presence[0]
    every = [penalise(np.float32(logit), *penalties, count) for count in range(most + 1)]
    assert got == max(np.float32(logit), *every)
    if flat.repetition[0] >= 1 and flat.frequency[0] >= 0 and flat.presence[0] >= 0:
        assert got == np.float32(logit)


def test_rows_of_different_tables_are_put_together() -> None:
    random = np.random.default_rng(8)
    adjustments = [random_adjustment(random, 50) for _ in range(5)]
    together = flatten_adjustments([None, *adjustments])
    assert together.tables.flags.c_contiguous
    for row, adjustment in enumerate(adjustments, 1):
        assert (together.table[row] < 0) == (adjustment.table < 0)
        if adjustment.table >= 0:
            assert adjustment.tables is not None
            ours = together.tables[together.table[row], :50]
            assert np.array_equal(ours, adjustment.tables[adjustment.table, :50])
