"""Prompt look-up: what followed the same tokens before, found without looking at the text again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.drafter import lookup
from lexshard.actors.drafter.lookup import LookupDrafter
from lexshard.actors.drafter.task import DraftTask
from tests.support.draft_cases import guessed


def task(history: list[int], most: int = 5, sequence: int = 0) -> DraftTask:
    return DraftTask(sequence, history, most, 0, 0.0)


def searched(history: list[int], most: int) -> list[int]:
    """The answer by looking everywhere."""
    for length in (4, 3, 2):
        for end in range(len(history) - 1, length - 1, -1):
            if history[end - length : end] == history[-length:]:
                return history[end : end + most]
    return []


@given(
    history=st.lists(st.integers(0, 3), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    most=st.integers(1, 6),
)
def test_the_longest_and_latest_occurrence_is_continued(
    history: list[int], cuts: list[int], most: int
) -> None:
    """Whenever it is asked while the history grows."""
    drafter = LookupDrafter()
    for cut in [*sorted(cuts), len(history)]:
        known = history[:cut]
        expected = searched(known, most)
        assert guessed(drafter, [task(known, most)]) == [expected]


def test_every_sequence_has_its_own_text() -> None:
    drafter = LookupDrafter()
    text, other = [1, 2, 3, 4, 1, 2], [1, 2, 9, 9, 1, 2]
    tasks = [task(text, 2, sequence=7), task(other, 2, sequence=8), task(text, 0, sequence=9)]
    assert guessed(drafter, tasks) == [[3, 4], [9, 9], []]
    drafter.forget(7)
    drafter.forget(12345)
    assert guessed(drafter, [task(other, 2, sequence=7)]) == [[9, 9]]


def test_a_long_prompt_holds_up_no_other_and_is_known_after_some_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one call indexes is limited, and so is what sequences hold in all: of a long text the
    end counts."""
    monkeypatch.setattr(lookup, "TOKENS_PER_CALL", 10)
    monkeypatch.setattr(lookup, "TOKENS_PER_SEQUENCE", 100)
    monkeypatch.setattr(lookup, "TOKENS_IN_ALL", 150)
    drafter = LookupDrafter()
    text = [*range(1000), 990, 991]  # what followed the last two stands near the end
    other = [*range(2000, 2200), 2190, 2191]

    def held() -> list[int]:
        return [index.size for index in drafter._indices.values()]

    calls = 0
    while not (draft := drafter.propose([task(text, 3)])[0]).token_ids:
        assert draft.reads
        calls += 1
        assert held() == [10 * calls]
    assert calls == 9  # the hundred tokens before its last, ten by ten
    for _ in range(20):
        guessed(drafter, [task(text, 3), task(other, 3, sequence=1)])
        assert sum(held()) <= 150
    assert guessed(drafter, [task([*range(1000), 890, 891], 3)]) == [[]]  # too long ago
    for step in range(300):
        text.append(5000 + step)
        guessed(drafter, [task(text, 3)])
        assert held()[0] <= 100
    drafter.forget(0)
    for _ in range(20):
        found = guessed(drafter, [task(other, 3, sequence=1)])
    assert found == [[2192, 2193, 2194]]
    monkeypatch.setattr(lookup, "TOKENS_IN_ALL", sum(held()) + 5)
    reads = [drafter.propose([task(text, 3, sequence=2)])[0].reads for _ in range(2)]
    assert reads == [True, False]  # where there is no room for more, none is waited for
