"""The row table of a step: a row that assumes guesses asks what its sequence would after them."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.penalties import adjust

SIZE, EOS = 12, (0,)
IDS = st.lists(st.integers(0, SIZE - 1), max_size=3).map(tuple)
MASKS = [Mask.of_ids(range(0, SIZE, step), SIZE) for step in (1, 2, 5)]
PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.2]),
    bad_words=st.sampled_from([(), ((5, 6),), ((1,), (2, 3, 4))]),
    min_tokens=st.integers(0, 4),
    logit_bias=st.sampled_from([(), ((7, 1.0),)]),
    logprobs=st.sampled_from([None, 2]),
)


def asked(table: RowTable) -> list[object]:
    """All that a table says, as values that can be compared."""
    ids = np.tile(np.arange(SIZE, dtype=np.int32), len(table))
    ends = np.arange(len(table) + 1, dtype=np.int64) * SIZE
    adjusted = adjust(ids, np.linspace(-2, 2, len(ids), dtype=np.float32), ends, table.flat)
    packed = None if table.packed is None else table.packed.position.tolist()
    return [
        table.kinds,
        table.searched.tolist(),
        [each.tolist() for each in table.controls],
        table.min_p.tolist(),
        table.logprobs,
        adjusted.tobytes(),
        packed,
    ]


@settings(deadline=None)
@example(  # chance seldom has the same rows twice
    parameters=[SamplingParameters(), SamplingParameters()],
    steps=[((), False, [(3,), (4,), ()], turn) for turn in (1, 1, 2)],
    grammars=1,
)
@given(
    parameters=st.lists(PARAMETERS, min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(IDS, st.booleans(), st.lists(IDS, min_size=3, max_size=3), st.integers(0, 3)),
        max_size=6,
    ),
    grammars=st.integers(0, 3),
)
def test_a_table_asks_what_rows_of_their_own_sequences_ask(
    parameters: list[SamplingParameters],
    steps: list[tuple[tuple[int, ...], bool, list[tuple[int, ...]], int]],
    grammars: int,
) -> None:
    """Kept from earlier steps or not, with guesses, of all rows or the last, and without: each row
    is compared with a new sequence whose own tokens the guesses are. Then every sequence goes on
    with other tokens; guesses leave no trace. The first ``grammars`` sequences have masks, those of
    the step before or others."""
    kept = SequenceStates(SIZE, EOS, 1)
    outputs: list[tuple[int, ...]] = [()] * len(parameters)
    for name, each in enumerate(parameters):
        kept.open(name, Request(str(name), 0, (name, 4), each))
    for guesses, last_alone, said, turn in [((), False, [()] * 3, 0), *steps]:
        prefixes = [
            guesses[:count] for count in range(len(guesses) if last_alone else 0, len(guesses) + 1)
        ]
        rows = [(name, prefix) for name in range(len(parameters)) for prefix in prefixes]
        drafted = tuple(prefix for _, prefix in rows) if guesses else ()
        masks = tuple(
            MASKS[(row + turn) % len(MASKS)] if name < grammars else None
            for row, (name, _) in enumerate(rows)
        )
        if not grammars:
            masks = ()
        asks = RowNames(tuple(name for name, _ in rows), drafted, masks=masks)
        table = kept.table(asks)
        assert kept.table(asks) is table  # for the sampler beside the head
        plain = SequenceStates(SIZE, EOS, 1)
        for row, (name, prefix) in enumerate(rows):
            own = outputs[name] + prefix
            plain.open(row, Request(str(row), 0, (name, 4), parameters[name], resumed_ids=own))
        alone = RowNames(tuple(range(len(rows))), masks=masks)
        assert asked(table) == asked(plain.table(alone))
        for name, tokens in zip(range(len(parameters)), said, strict=False):
            kept[name].append(*tokens)
            outputs[name] += tokens
    for name in range(len(parameters)):
        kept.close(name)
    assert not kept.tables.any()


def test_some_rows_ask_what_they_ask_among_all() -> None:
    states = SequenceStates(SIZE, EOS, 1)
    kinds = [
        SamplingParameters(temperature=0.8, top_k=3, bad_words=((5,),)),
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=1.0, presence_penalty=0.5),
    ]
    for name, parameters in enumerate(kinds):
        states.open(name, Request(str(name), 0, (1, 2), parameters))
    table = states.table(RowNames((0, 1, 2)))
    assert table.some(range(3)) is table
    some = table.some([2, 0])
    for place, row in enumerate((2, 0)):
        assert some.kinds[place] == table.kinds[row]
        assert some.adjustments[place] is table.adjustments[row]
        assert [each[place] for each in some.controls] == [each[row] for each in table.controls]


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
