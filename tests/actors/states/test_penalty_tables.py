"""Tables of counts say what the histories say, and cost the same whatever their length."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.messages import Drafting, Drafts, Request, SamplingParameters
from lexshard.actors.states.penalty_tables import PenaltyTables
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import MOST_AHEAD, SequenceStates
from tests.support.demo_engine import demo_engine

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


def test_rows_of_many_guesses_are_given_back_when_their_step_is_settled() -> None:
    """Then they are of others, and none knows what another has seen."""
    states = SequenceStates(VOCABULARY, (), 1)
    penalised = SamplingParameters(repetition_penalty=1.1)
    guesses = list(range(10, 70))
    drafted = tuple(tuple(guesses[:count]) for count in range(len(guesses) + 1))
    for sequence in range(8):
        states.open(sequence, Request(str(sequence), 0, (1, 2), penalised))
    for said in range(2):
        for sequence in range(8):
            asked = states.table(RowNames((sequence,) * len(drafted), drafted)).flat
            for row, own in enumerate(drafted):
                seen = _expected([1, 2], [*[10] * said, *own])
                assert np.array_equal(asked.tables[asked.table[row]], seen)
            states[sequence].append(10)
    assert len(states.tables) <= 256  # of 8 sequences with 60 guesses, one after the other


def test_an_engine_has_few_rows_however_many_guesses_come() -> None:
    """A client sends all that will be said, 64 tokens at a time."""
    penalised = SamplingParameters(
        temperature=0.8, repetition_penalty=1.1, max_tokens=100, ignore_eos=True, seed=5
    )
    requests = [Request(str(i), 0, (i + 20, *range(30, 40)), penalised) for i in range(4)]
    engine = demo_engine(max_model_len=128, max_running=4)
    told = run_to_completion(engine, requests)
    texts = {each.request_id: own.token_ids for each, own in zip(requests, told, strict=True)}
    said: dict[str, list[int]] = {name: [] for name in texts}
    for request in requests:
        engine.submit(replace(request, drafting=Drafting("client")))
    steps = 0
    while any(len(said[name]) < len(text) for name, text in texts.items()):
        steps += 1
        for event in engine.step():
            name, own = event.request_id, said[event.request_id]
            own.extend(event.token_ids)
            if following := texts[name][len(own) :][:64]:
                engine.draft(Drafts(name, 0, len(requests[0].prompt_ids) + len(own), following))
    assert {name: tuple(own) for name, own in said.items()} == texts
    assert steps < 100 // MOST_AHEAD + 8
    assert len(engine._states.tables) <= 2 * 4 * (1 + MOST_AHEAD)
    engine.close()
