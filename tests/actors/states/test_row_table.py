"""The row table of a step: kept from earlier steps or made anew, it asks the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.penalties import adjust

SIZE, EOS = 12, (0,)
IDS = st.lists(st.integers(0, SIZE - 1), max_size=3).map(tuple)
PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    bad_words=st.sampled_from([(), ((5, 6),)]),
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
@given(
    parameters=st.lists(PARAMETERS, min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(IDS, st.booleans(), st.lists(IDS, min_size=3, max_size=3)), max_size=6
    ),
)
def test_a_table_that_was_kept_asks_what_a_new_one_asks(
    parameters: list[SamplingParameters],
    steps: list[tuple[tuple[int, ...], bool, list[tuple[int, ...]]]],
) -> None:
    """Steps with guesses, of all rows or the last, and without; every sequence then says others."""
    requests = [Request(str(n), 0, (n, 4), each) for n, each in enumerate(parameters)]
    kept = SequenceStates(SIZE, EOS, 1)
    outputs: list[tuple[int, ...]] = [()] * len(requests)
    for name, request in enumerate(requests):
        kept.open(name, request)
    for guesses, last_alone, said in [((), False, [()] * 3), *steps]:
        places = range(len(guesses) if last_alone else 0, len(guesses) + 1)
        names = tuple(name for name in range(len(requests)) for _ in places)
        drafted = tuple(guesses[:place] for _ in requests for place in places)
        asks = RowNames(names, drafted if guesses else ())
        fresh = SequenceStates(SIZE, EOS, 1)
        for name, request in enumerate(requests):
            fresh.open(name, request).append(*outputs[name])
        table = kept.table(asks)
        assert kept.table(asks) is table  # for the sampler beside the head
        assert asked(table) == asked(fresh.table(RowNames(*asks)))
        for name, tokens in zip(range(len(requests)), said, strict=False):
            kept[name].append(*tokens)
            outputs[name] += tokens


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
