"""The decision: certified equals dense token for token, and draws follow the softmax."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.draw import Controls, draw
from lexshard.kernels.rows import canonical_logits
from tests.support.sampler_cases import (
    EOS,
    DenseHead,
    decide_step,
    parameters_of,
    state_of,
    weight_of,
)

settings.register_profile("sampler", deadline=None)
settings.load_profile("sampler")


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 5),
    size=st.integers(5, 300),
    columns=st.integers(1, 40),
    flavour=st.sampled_from(["plain", "duplicates", "zero", "huge", "overflow", "coarse"]),
    post=st.sampled_from([(False, None, 1.0), (True, None, 0.25), (True, 30.0, 2.0)]),
    bfloat16=st.booleans(),
)
def test_certified_equals_dense_token_for_token(
    seed: int,
    rows: int,
    size: int,
    columns: int,
    flavour: str,
    post: tuple[bool, float | None, float],
    bfloat16: bool,
) -> None:
    random = np.random.default_rng(seed)
    weight = weight_of(random, size, columns, flavour)
    weight = weight.bfloat16() if bfloat16 else weight
    padding = torch.full((int(random.integers(0, 9)), columns), 1e9, dtype=weight.dtype)
    bias = torch.from_numpy(random.standard_normal(size).astype(np.float32)) if post[0] else None
    padded_bias = None if bias is None else torch.cat([bias, torch.full((len(padding),), 1e9)])
    shard = Shard(torch.cat([weight, padding]), padded_bias, post[1], post[2], size)
    dense = DenseHead(weight, bias, post[1], post[2])
    prompts = [
        tuple(random.integers(0, size, random.integers(1, 30)).tolist()) for _ in range(rows)
    ]
    states = [state_of(parameters_of(random, size), size, prompt) for prompt in prompts]
    for _ in range(3):
        hidden = torch.from_numpy(random.standard_normal((rows, columns)).astype(np.float32))
        expected = [dense.token(h, state) for h, state in zip(hidden, states, strict=True)]
        decisions = decide_step(shard, hidden, states)
        assert [-1 if d is None else d.token_id for d in decisions] == expected
        for state, token in zip(states, expected, strict=True):
            state.append(max(token, 0))


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


def _chi_square(size: int, draws: int, bins: int, temperature: float) -> float:
    """The p-value of ``draws`` draws over a vocabulary, tokens binned by descending share."""
    random = np.random.default_rng(size)
    logits = (2 * random.standard_normal(size)).astype(np.float32)
    ids, offsets = np.arange(size, dtype=np.int32), np.array([0, size])
    inverse = float(np.float32(1 / temperature))
    scaled = logits.astype(np.float64) * inverse
    shares = np.exp(scaled - np.logaddexp.reduce(scaled))
    order = np.argsort(-shares, kind="stable")
    bin_of = np.empty(size, np.int64)
    bin_of[order] = np.minimum(np.cumsum(shares[order]) * bins, bins - 1).astype(np.int64)
    counts: Counter[int] = Counter()
    for position in range(draws):
        controls = Controls(
            np.array([inverse]),
            np.zeros(1, np.int64),
            np.ones(1),
            np.array([-math.inf]),
            np.array([size], np.uint64),
            np.array([position], np.uint64),
        )
        counts[int(bin_of[draw(ids, logits, offsets, controls)[0]])] += 1
    expected = np.bincount(bin_of, weights=shares, minlength=bins) * draws
    used = expected > 0
    observed = np.array([counts[b] for b in range(bins)], np.float64)
    return float(stats.chisquare(observed[used], expected[used]).pvalue)


@pytest.mark.parametrize(
    ("size", "draws", "bins", "temperature"),
    [
        *((111, 20_000, 20, each) for each in (0.7, 1.5)),
        *((32_000, 4_000, 20, each) for each in (0.7, 1.5)),
        *((128_256, 1_500, 20, each) for each in (0.7, 1.5)),
        pytest.param(111, 100_000, 50, 1.0, marks=pytest.mark.slow),
        pytest.param(32_000, 30_000, 50, 1.0, marks=pytest.mark.slow),
        pytest.param(128_256, 30_000, 50, 1.0, marks=pytest.mark.slow),
    ],
)
def test_draws_follow_the_softmax(size: int, draws: int, bins: int, temperature: float) -> None:
    """False-alarm rate 1e-4 per case; seeds are fixed."""
    assert _chi_square(size, draws, bins, temperature) > 1e-4
