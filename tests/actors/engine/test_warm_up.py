"""What an engine runs before it serves: every kind of sampling, and sizes where sizes matter."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from lexshard.actors.decision import sampler
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.start.warm_up import warm_up_requests
from lexshard.actors.grammar import grammars
from lexshard.actors.head import plain_steps
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.kernels import ahead
from lexshard.kernels.ahead import ONE_CALL, SEVERAL_STEPS, WHOLE_ROWS
from tests.support.demo_engine import demo_engine

MOST, STEP = 16, 512


def rounds(*, sizes_matter: bool) -> list[tuple[int, int]]:
    """How many requests each round has, and their longest prompt."""
    found = warm_up_requests(2048, MOST, STEP, 1000, sizes_matter=sizes_matter)
    return [(len(each), max(len(request.prompt_ids) for request in each)) for each in found]


def test_where_sizes_matter_every_one_is_run_and_a_prompt_that_fills_a_step() -> None:
    made = rounds(sizes_matter=True)
    assert [size for size, _ in made[-4:]] == [2, 4, 8, 16]
    assert any(prompt > STEP for _, prompt in made)


def test_elsewhere_every_kind_is_run_and_the_largest_batch_with_short_prompts() -> None:
    made = rounds(sizes_matter=False)
    kinds = len([size for size, _ in rounds(sizes_matter=True) if size == 1]) - 1
    assert [size for size, _ in made] == [1] * kinds + [kinds, MOST]
    assert max(prompt for _, prompt in made) < 32


def test_rows_of_all_logits_are_decided_the_same_before_their_kernel_is_at_hand(
    prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [
        SamplingParameters(temperature=0.0, logprobs=2, max_tokens=8),
        SamplingParameters(temperature=0.9, top_p=0.7, logprobs=0, seed=1, max_tokens=8),
        SamplingParameters(
            temperature=1.1, top_k=40, presence_penalty=0.7, logprobs=1, seed=2, max_tokens=8
        ),
    ]
    ready, not_yet = demo_engine(), demo_engine()

    def told(engine: Engine, kind: SamplingParameters) -> list[tuple[object, ...]]:
        found = engine.generate(prompt_ids[:3], kind)
        return [(each.token_ids, each.logprobs) for each in found]

    expected = [told(ready, each) for each in kinds]
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "decide_dense", None)
        patch.setattr(ahead, "_postponed", {WHOLE_ROWS})
        not_yet.warm_up()
        assert [told(not_yet, each) for each in kinds] == expected
    decide_dense = Mock(wraps=sampler.decide_dense)
    monkeypatch.setattr(sampler, "decide_dense", decide_dense)
    assert told(not_yet, kinds[1]) == expected[1]
    assert decide_dense.called


def test_plain_rows_are_decided_the_same_before_their_one_call_is_at_hand(
    prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [
        SamplingParameters(temperature=0.0, max_tokens=12),
        SamplingParameters(temperature=0.9, seed=1, max_tokens=12),
        SamplingParameters(temperature=1.0, top_p=0.7, seed=2, max_tokens=12),
        SamplingParameters(temperature=1.1, top_k=40, min_p=0.05, seed=3, max_tokens=12),
    ]
    engine = demo_engine()

    def told() -> list[list[tuple[int, ...]]]:
        return [[each.token_ids for each in engine.generate(prompt_ids[:3], of)] for of in kinds]

    one_call = Mock(wraps=plain_steps.certified_candidates)
    with monkeypatch.context() as patch:
        patch.setattr(plain_steps, "certified_candidates", None)
        patch.setattr(ahead, "_postponed", {ONE_CALL, SEVERAL_STEPS})
        engine.warm_up()
        expected = told()
    monkeypatch.setattr(plain_steps, "certified_candidates", one_call)
    monkeypatch.setattr(ahead, "_postponed", {SEVERAL_STEPS})
    assert told() == expected
    assert one_call.called


def test_a_first_grammar_finds_the_tokenizer_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large vocabulary: it holds the interpreter lock as it is made, which is not to be while
    streams are served. Of a small one an engine that sees no grammar has none."""
    engine = demo_engine()
    made = Mock(wraps=grammars.grammar_tokenizer)
    monkeypatch.setattr(grammars, "grammar_tokenizer", made)
    engine.warm_up()
    made.assert_not_called()
    monkeypatch.setattr(grammars, "LARGE_VOCABULARY", 16_384)
    engine.warm_up()
    made.assert_called_once()
    asked = SamplingParameters(max_tokens=9, grammar='start: "one certain word"')
    event = engine.submit(Request("first", 0, (5, 6), asked))
    assert event is not None
    assert event.finish_reason == "stop"
    made.assert_called_once()
    engine.close()


def test_a_model_without_a_tokenizer_for_grammars_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=ValueError("no tokenizer.json: grammars say which text may follow"))
    monkeypatch.setattr(grammars, "grammar_tokenizer", refuse)
    monkeypatch.setattr(grammars, "LARGE_VOCABULARY", 0)
    engine = demo_engine()
    engine.warm_up()
    refuse.assert_called_once()
    asked = SamplingParameters(max_tokens=9, grammar='start: "one certain word"')
    event = engine.submit(Request("first", 0, (5, 6), asked))
    assert event is not None
    assert event.refused
    assert "tokenizer.json" in (event.error or "")
    engine.close()
