"""A row that assumes guesses sees what its sequence would see after them, and leaves no trace."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceState, SequenceStates
from tests.support.decisions import need_of

SIZE = 40
EOS = (0, 3)
IDS = st.lists(st.integers(0, SIZE - 1), max_size=8).map(tuple)
PARAMETERS = st.builds(
    SamplingParameters,
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.2]),
    bad_words=st.sampled_from([(), ((5, 6),), ((1,), (2, 3, 4))]),
    min_tokens=st.integers(0, 6),
    logit_bias=st.sampled_from([(), ((7, 1.0),)]),
)


def same(state: SequenceState, drafted: tuple[int, ...], plain: SequenceState) -> None:
    """What ``state`` asks after ``drafted`` is what ``plain``, whose own they are, asks."""
    ahead, own = need_of(state, drafted), need_of(plain)
    assert ahead.position == own.position
    a, b = ahead.adjustment, own.adjustment
    assert (a is None) == (b is None)
    if a is None or b is None:
        return
    assert a.banned.tolist() == b.banned.tolist()
    assert (a.tables is None) == (b.tables is None)
    if a.tables is not None and b.tables is not None:
        assert a.tables[a.table].tolist() == b.tables[b.table].tolist()


@given(
    parameters=PARAMETERS,
    prompt=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=10).map(tuple),
    rounds=st.lists(st.tuples(IDS, IDS), max_size=6),
)
def test_guesses_count_like_tokens_and_are_forgotten(
    parameters: SamplingParameters, prompt: tuple[int, ...], rounds: list
) -> None:
    """Rounds of guesses and of tokens that came instead, every prefix of the guesses at once."""
    states = SequenceStates(SIZE, EOS, 1)
    state = states.open(1, Request("a", 0, prompt, parameters))
    output: tuple[int, ...] = ()
    for drafted, tokens in rounds:
        prefixes = [drafted[:count] for count in range(len(drafted) + 1)]
        states.table(RowNames((1,) * len(prefixes), tuple(prefixes)))  # all in one step
        for prefix in prefixes:
            plain = SequenceState(
                Request("a", 0, prompt, parameters, 0, output + prefix), SIZE, EOS
            )
            same(state, prefix, plain)
        state.append(*tokens)
        output += tokens
        same(state, (), SequenceState(Request("a", 0, prompt, parameters, 0, output), SIZE, EOS))
    states.close(1)
    assert not states.tables.any()


def test_rows_of_a_step_share_one_array_when_tables_grow() -> None:
    parameters = SamplingParameters(frequency_penalty=1.0)
    states = SequenceStates(SIZE, EOS, 1)
    for name in range(3):
        states.open(name, Request("a", 0, (name,), parameters))
    drafted = ((), (4,), (4, 5), (), (6,), ())
    table = states.table(RowNames((0, 0, 0, 1, 1, 2), drafted))
    assert {id(each.tables) for each in table.adjustments if each} == {id(states.tables)}
    rows = [each.table for each in table.adjustments if each is not None]
    assert len(set(rows)) == 6
    assert states.tables[rows[2], [0, 4, 5]].tolist() == [1, 2, 2]


def test_several_tokens_travel_as_one_delta() -> None:
    follower = Follower()
    request = Request("a", 0, (1, 2), SamplingParameters(presence_penalty=1.0))
    follower.open(5, FollowedSequence(request, [1, 2]))
    there = SequenceStates(SIZE, EOS, 1)
    there.apply(follower.take())
    follower.append(5, (7, 8, 9))
    follower.append(5, (3,))
    deltas = follower.take()
    assert deltas == Deltas(appended=((5, (7, 8, 9)), (5, (3,))))
    there.apply(deltas)
    assert there[5].history == [1, 2, 7, 8, 9, 3]
    adjustment = there[5].adjustment()
    assert adjustment is not None
    assert adjustment.tables is not None
    assert np.flatnonzero(adjustment.tables[adjustment.table]).tolist() == [1, 2, 3, 7, 8, 9]
