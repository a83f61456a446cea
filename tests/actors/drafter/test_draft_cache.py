"""Which tokens a draft model's cache gets next, and which sequence has to make room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.drafter.draft_cache import MOST_PENDING, DraftCache, block_tables
from lexshard.actors.drafter.task import DraftTask


def task(sequence: int, history: list[int], most: int = 4) -> DraftTask:
    return DraftTask(sequence, history, most, 0, 0.0)


def test_what_is_put_in_is_what_the_cache_lacks() -> None:
    cache = DraftCache(8, 256)
    history = [1, 2, 3]
    (turn,) = cache.turns([task(0, history)])
    assert (turn.tokens, turn.start, turn.most) == ([1, 2, 3], 0, 4)
    turn.finish([10, 11, 12, 13])
    history += [10, 11, 99]  # two stand, and another token comes
    (turn,) = cache.turns([task(0, history)])
    assert (turn.tokens, turn.start) == ([99], 5)
    turn.finish([20, 21])
    history += [20, 21, 5]  # all stand: the last was guessed, but not put in
    (turn,) = cache.turns([task(0, history)])
    assert (turn.tokens, turn.start) == ([21, 5], 7)
    turn.finish([6])
    (turn,) = cache.turns([task(0, history)])  # nothing has come
    assert (turn.tokens, turn.start) == ([5], 8)


def test_a_long_prompt_takes_several_calls_and_the_others_do_not_wait() -> None:
    cache = DraftCache(200, 4096)
    long, short = list(range(1200)), [1, 2]
    seen = []
    for _ in range(4):
        turns = cache.turns([task(0, long), task(1, short)])
        assert sum(turn.count for turn in turns) <= MOST_PENDING
        seen.append({turn.index: (turn.count, turn.most) for turn in turns})
        for turn in turns:
            turn.finish([7] * turn.most)
        short += [7, 8]
    assert [turns[1] for turns in seen] == [(2, 4), (1, 4), (1, 4), (1, 4)]
    assert [turns[0] for turns in seen] == [(510, 0), (511, 0), (179, 4), (1, 4)]


def test_nothing_lies_beyond_the_models_positions() -> None:
    cache = DraftCache(8, 32)
    lengths = {29: 4, 30: 3, 31: 2, 32: 1}  # the last guess is not put in
    for length, most in lengths.items():
        (turn,) = cache.turns([task(length, list(range(length)))])
        assert turn.most == most
        assert block_tables([turn]).shape == (1, 2)
        cache.forget(length)
    (turn,) = cache.turns([task(0, list(range(32)))])
    turn.finish([1])
    assert cache.turns([task(0, list(range(33)))]) == []
    cache.check()
    assert cache.used == 0


def test_the_least_recently_drafted_makes_room() -> None:
    cache = DraftCache(6, 256)
    histories = {name: list(range(20)) for name in range(4)}  # two blocks each
    for name in range(3):
        cache.turns([task(name, histories[name])])[0].finish([])
    cache.turns([task(0, histories[0])])[0].finish([])
    # Without room for all, those of the call that come first are drafted for.
    assert [turn.index for turn in cache.turns([task(3, histories[3])])] == [0]
    starts = {name: cache.turns([task(name, histories[name])])[0].start for name in (2, 0)}
    assert starts == {0: 19, 2: 19}  # it was sequence 1 that had to go
    cache.check()


def test_a_sequence_that_finds_no_room_holds_none() -> None:
    """Half a sequence is of no use, and keeps others out."""
    cache = DraftCache(4, 256)
    one, other = list(range(30)), list(range(30))
    turns = cache.turns([task(0, one, 2), task(1, other, 2)])
    assert len(turns) == 2
    for turn in turns:
        turn.finish([])
    one += [1, 2, 3]
    assert [turn.task.sequence for turn in cache.turns([task(0, one, 2), task(1, other, 2)])] == [1]
    assert [turn.start for turn in cache.turns([task(0, one, 2)])] == [0]
    cache.check()


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_block_is_lost_or_has_two_owners(data: st.DataObject) -> None:
    cache = DraftCache(data.draw(st.integers(1, 12)), 100)
    histories: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        tasks = []
        for name in data.draw(st.sets(st.integers(0, 6))):
            history = histories.setdefault(name, [name])
            history.extend([7] * data.draw(st.integers(0, 30)))
            tasks.append(task(name, history, data.draw(st.integers(0, 5))))
        turns = cache.turns(tasks)
        cache.check()
        held = [block for turn in turns for block in turn.cached.blocks]
        assert len(set(held)) == len(held)
        for turn in turns:
            written = turn.start + turn.count + max(0, turn.most - 1)
            assert written <= min(100, 16 * len(turn.cached.blocks))
            assert turn.start + turn.count <= len(turn.task.history)
            assert (turn.most == 0) == (turn.start + turn.count < len(turn.task.history))
            turn.finish([7] * turn.most)
        for name in data.draw(st.sets(st.integers(0, 8))):
            cache.forget(name)
            histories.pop(name, None)
        cache.check()
