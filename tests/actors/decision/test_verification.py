"""Guesses tested by distributions in a sampler: what a row emits, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lexshard.actors.decision.messages import DecisionWork, DenseRows, SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.proposal import GuessTest, Proposal
from lexshard.actors.states.deltas import Deltas, OpenSequence
from lexshard.actors.states.row_table import RowNames, flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.cluster.samplers.process import SamplerProcess
from lexshard.kernels.penalties import reference as penalties_reference
from lexshard.kernels.truncate import reference as truncate_reference
from tests.support.sampler_cases import verified_token

SIZE = 500
KINDS = (
    SamplingParameters(temperature=1.0),
    SamplingParameters(temperature=0.8, top_k=40),
    SamplingParameters(temperature=1.1, top_p=0.9, logprobs=2),
    SamplingParameters(temperature=0.7, min_p=0.05, repetition_penalty=1.3, bad_words=((4,),)),
    SamplingParameters(temperature=0.9, allowed_ids=tuple(range(5, 400)), presence_penalty=0.5),
    SamplingParameters(temperature=1.2, allowed_ids=(3,), bad_words=((3,),)),
)
SETTINGS = SamplerSettings(SIZE, ())


@pytest.fixture(scope="module")
def process() -> Iterator[SamplerHandle]:
    sampler = SamplerProcess(SETTINGS, rows=3)  # fewer than the rows of a sequence
    yield sampler
    sampler.close()


def step_of(seed: int, certain: bool) -> tuple[DecisionWork, list[SequenceState]]:
    """Four rows of every sequence: three test a guess, the last one draws."""
    random = np.random.default_rng(seed)
    opened, states, names, drafted = [], [], [], []
    tests: dict[int, GuessTest] = {}  # by row
    logits = (3.0 * random.standard_normal((4 * len(KINDS), SIZE))).astype(np.float32)
    for name, kind in enumerate(KINDS):
        prompt = tuple(random.integers(0, SIZE, 6).tolist())
        request = Request(str(name), 0, prompt, kind)
        opened.append(OpenSequence(100 * seed + name, request))
        states.append(SequenceState(request, SIZE, ()))
        guesses = tuple(random.integers(0, SIZE, 3).tolist())
        for row in range(4):
            names.append(100 * seed + name)
            drafted.append(guesses[:row])
            if row == 3:
                continue
            ids = np.union1d(random.choice(SIZE, 80), [guesses[row]]).astype(np.int32)
            likely = logits[4 * name + row][ids] + random.standard_normal(len(ids))
            proposal = Proposal(ids, likely.astype(np.float32), 1.1)
            tests[len(names) - 1] = GuessTest(guesses[row], None if certain else proposal)
    dense = DenseRows(RowNames(tuple(names), tuple(drafted), tests), logits)
    return DecisionWork(seed, Deltas(opened=tuple(opened)), dense=dense), states


def expected_token(dense: DenseRows, place: int, state: SequenceState) -> int:
    """By the plain functions, each of which has its reference."""
    test = dense.rows.tests[place]
    ids, ends = np.arange(SIZE, dtype=np.int32), np.array([0, SIZE])
    adjustments = flatten_adjustments([state.adjustment(dense.rows.drafted[place])])
    row = penalties_reference.adjust(ids, dense.logits[place], ends, adjustments)
    parameters = state.parameters
    stays = truncate_reference.truncate(
        row, state.inverse_temperature, state.top_k, parameters.top_p, state.log_min_p
    )
    kept = np.where(stays, row, np.float32(-np.inf))
    position = state.position + len(dense.rows.drafted[place])
    return verified_token(test, kept, state.inverse_temperature, state.key, position)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_tested_row_emits_what_the_plain_functions_say(
    process: SamplerProcess, seed: int, certain: bool
) -> None:
    """Every control, and the draws beside it as without tests; here and in another process."""
    work, states = step_of(seed + 10 * certain, certain)
    assert work.dense is not None
    here = Sampler(SETTINGS).decide(work).decisions
    assert process.submit(work).result().decisions == here
    plain = DenseRows(work.dense.rows._replace(tests={}), work.dense.logits)
    drawn = Sampler(SETTINGS).decide(DecisionWork(seed, work.deltas, dense=plain)).decisions
    for place, decision in enumerate(here):
        state = states[place // 4]
        if place not in work.dense.rows.tests:
            assert decision == drawn[place]
            continue
        token = expected_token(work.dense, place, state)
        assert (-1 if decision is None else decision.token_id) == token
        if decision is not None and state.parameters.logprobs is not None:
            assert decision.logprobs is not None
            assert decision.logprobs.token_id == token


def test_sigmoids_need_to_know_what_a_guess_was_drawn_from() -> None:
    work, _ = step_of(1, certain=True)
    assert work.dense is not None
    rows = work.dense.rows
    by_sigmoids = {row: replace(test, exactly=False) for row, test in rows.tests.items()}
    dense = replace(work.dense, rows=rows._replace(tests=by_sigmoids))
    with pytest.raises(ValueError, match="this drafter is certain"):
        Sampler(SETTINGS).decide(replace(work, dense=dense))
