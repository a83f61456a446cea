"""Tables of counts say what the histories say, and cost the same whatever their length."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.states.penalty_tables import PenaltyTables

VOCABULARY = 97
IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


def _expected(prompt: list[int], output: list[int]) -> np.ndarray:
    table = np.zeros(VOCABULARY, np.int32)
    table[prompt] = 1
    for token_id, count in Counter(output).items():
        table[token_id] = 1 + count
    return table


@given(st.lists(st.tuples(IDS, IDS, IDS, st.booleans()), min_size=1, max_size=12))
def test_rows_count_what_was_seen(
    sequences: list[tuple[list[int], list[int], list[int], bool]],
) -> None:
    """Through openings, appended tokens, closings and growth, no row knows of another."""
    tables = PenaltyTables(VOCABULARY, 1)
    living: dict[int, tuple[list[int], list[int]]] = {}
    for prompt, output, appended, closes in sequences:
        row = tables.open(prompt, output)
        assert row not in living
        living[row] = (prompt, [*output, *appended])
        for token_id in appended:
            tables.append(row, token_id)
        if closes:
            oldest = next(iter(living))
            tables.close(oldest, [token for part in living.pop(oldest) for token in part])
            assert not tables.tables[oldest].any()
        for each, (seen, drawn) in living.items():
            assert np.array_equal(tables.tables[each], _expected(seen, drawn))


@given(
    prompt=IDS,
    steps=st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()), max_size=120),
    asked=st.booleans(),
)
def test_the_list_of_what_was_seen_follows_its_table(
    prompt: list[int], steps: list[tuple[int, bool]], asked: bool
) -> None:
    """From whenever it is first asked for, through tokens that come and guesses that are taken
    back; the next owner of the row has another list."""
    tables = PenaltyTables(VOCABULARY, 1)
    row = tables.open(prompt, [])
    undo: list[tuple[int, int]] = []
    for place, (token_id, takes_back) in enumerate(steps):
        if asked or place == 50:
            assert tables.seen(row).tolist() == np.flatnonzero(tables.tables[row]).tolist()
        if takes_back and undo:
            tables.take_back(row, *undo.pop())
        else:
            undo.append((token_id, tables.append(row, token_id)))
    assert tables.seen(row).tolist() == np.flatnonzero(tables.tables[row]).tolist()
    tables.close(row, list(range(VOCABULARY)))
    assert tables.open([5], [5]) == row
    assert tables.seen(row).tolist() == [5]


def test_rows_are_contiguous_in_one_array() -> None:
    tables = PenaltyTables(VOCABULARY, 3)
    assert tables.tables.flags.c_contiguous
    assert tables.tables.dtype == np.int32
    for _ in range(4):
        tables.open([0], [])
    assert tables.tables.flags.c_contiguous
    assert tables.tables.shape == (6, VOCABULARY)
