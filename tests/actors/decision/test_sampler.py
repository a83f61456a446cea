"""The decision: certified equals dense token for token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.rows import canonical_logits
from tests.support.sampler_cases import (
    EOS,
    HEAD_CASES,
    HeadCase,
    check_that_tokens_are_the_dense_heads,
    decide_step,
    parameters_of,
    state_of,
)

settings.register_profile("sampler", deadline=None)
settings.load_profile("sampler")


@settings(max_examples=150)
@given(HEAD_CASES)
def test_certified_equals_dense_token_for_token(case: HeadCase) -> None:
    check_that_tokens_are_the_dense_heads(case, Shard)


def _head(size: int = 300, columns: int = 24) -> tuple[Shard, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(size, columns, generator=generator)
    return Shard(weight, None, None, 1.0, size), torch.randn(64, columns, generator=generator)


def test_decisions_do_not_depend_on_the_batch() -> None:
    shard, hidden = _head()
    random = np.random.default_rng(2)
    parameters = [parameters_of(random, 300) for _ in range(20)]
    parameters = [p for p in parameters if p.allowed_ids is None]
    together = decide_step(shard, hidden[: len(parameters)], [state_of(p, 300) for p in parameters])
    for row, p in enumerate(parameters):
        assert decide_step(shard, hidden[row : row + 1], [state_of(p, 300)]) == [together[row]]


def test_choices_draw_with_keys_of_their_own() -> None:
    shard, hidden = _head()
    parameters = SamplingParameters(seed=2**64 - 2)
    states = [state_of(parameters, 300, choice=choice) for choice in range(64)]
    assert len({state.key for state in states}) == 64
    assert states[0].key == 2**64 - 2
    decisions = decide_step(shard, hidden[:1].expand(64, -1).contiguous(), states)
    assert len({decision.token_id for decision in decisions}) > 5


def test_a_replayed_sequence_continues_alike() -> None:
    shard, hidden = _head()
    parameters = SamplingParameters(seed=5, repetition_penalty=1.3, frequency_penalty=0.4)
    original = state_of(parameters, 300)
    tokens = []
    for step in range(20):
        tokens.append(decide_step(shard, hidden[step : step + 1], [original])[0].token_id)
        original.append(tokens[-1])
    resumed = SequenceState(Request("r", 0, (1, 2), parameters, 0, tuple(tokens[:10])), 300, EOS)
    for step in range(10, 20):
        token = decide_step(shard, hidden[step : step + 1], [resumed])[0].token_id
        assert token == tokens[step]
        resumed.append(token)


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        (SamplingParameters(temperature=0.0, top_k=5, top_p=0.5), "top1"),
        (SamplingParameters(), "top1"),
        (SamplingParameters(top_k=300), "top1"),
        (SamplingParameters(top_k=5), "topk"),
        (SamplingParameters(top_k=5, min_p=0.1, top_p=0.9), "topk"),
        (SamplingParameters(min_p=0.1, top_p=0.9), "minp"),
        (SamplingParameters(top_p=0.9), "nucleus-draw"),
        (SamplingParameters(temperature=0.0, logprobs=0), "dense"),
    ],
)
def test_parameters_name_their_need(parameters: SamplingParameters, kind: str) -> None:
    assert state_of(parameters, 300).kind == kind


def test_bad_words_minimum_length_and_eos() -> None:
    words = ((8,), (4, 6), (4, 5, 7))
    state = state_of(
        SamplingParameters(bad_words=words, min_tokens=2, stop_token_ids=(11,)), 300, (1, 4)
    )

    def banned() -> list[int]:
        adjustment = state.adjustment()
        assert adjustment is not None
        return adjustment.banned.tolist()

    assert banned() == [0, 3, 6, 8, 11]
    state.append(5)
    assert banned() == [0, 3, 7, 8, 11]
    state.append(2)
    assert banned() == [8]


def test_logprobs_are_of_the_raw_logits() -> None:
    shard, hidden = _head()
    parameters = SamplingParameters(logprobs=4, logit_bias=((5, 100.0),), temperature=0.5)
    decision = decide_step(shard, hidden[:1], [state_of(parameters, 300)])[0]
    assert decision.token_id == 5
    raw = canonical_logits(hidden[:1], shard.weight)[0].astype(np.float64)
    expected = raw - np.logaddexp.reduce(raw)
    order = np.argsort(-raw, kind="stable")
    logprobs = decision.logprobs
    assert logprobs is not None
    assert logprobs.rank == 1 + order.tolist().index(5)
    assert math.isclose(logprobs.logprob, expected[5], abs_tol=1e-9)
    assert [token for token, _ in logprobs.top] == order[:4].tolist()
    assert np.allclose([value for _, value in logprobs.top], expected[order[:4]], atol=1e-9)
    assert (logprobs.logit, *logprobs.top_logits) == tuple(raw[[5, *order[:4]]].tolist())


def test_equal_logits_go_to_the_lower_id() -> None:
    weight = torch.ones(200, 8)
    shard = Shard(weight, None, None, 1.0, 200)
    states = [state_of(SamplingParameters(temperature=0.0), 200)]
    assert decide_step(shard, torch.ones(1, 8), states) == [RowDecision(0)]


def test_rows_without_a_token_leave_the_others_alone() -> None:
    shard, hidden = _head()
    states = [state_of(SamplingParameters(allowed_ids=ids), 300) for ids in (None, (), (9,))]
    decisions = decide_step(shard, hidden[:3], states)
    assert [decision is None for decision in decisions] == [False, True, False]
    assert decisions[2] == RowDecision(9)
