"""The engine's promises on the demo model: right, the same in every circumstance, and tidy."""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import Collector, Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.kernels import pool
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO
from tests.support.stepped_engines import heard

PromptIds = list[tuple[int, ...]]

GREEDY = SamplingParameters(temperature=0.0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParameters(temperature=0.8, max_tokens=40, ignore_eos=True, seed=11)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = demo_engine()
    yield engine
    engine.check_idle()


def _tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    assert all(each.error is None for each in completions)
    return [each.token_ids for each in completions]


# -- right ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_greedy_equals_transformers_generate(
    engine: Engine, plain: Any, prompt_ids: PromptIds, count: int
) -> None:
    """A first difference must be a tie closer than 1e-3."""
    ours = _tokens(engine.generate(prompt_ids[:count], GREEDY))
    for prompt, mine in zip(prompt_ids, ours, strict=False):
        theirs = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        if theirs == list(mine):
            continue
        place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *mine[:place]]])).logits[0, -1]
        gap = abs(float(logits[mine[place]] - logits[theirs[place]]))
        assert gap < 1e-3, f"token {place} of prompt {prompt[:5]} differs by {gap}"


def test_logprobs_equal_the_plain_models(engine: Engine, plain: Any, prompt_ids: PromptIds) -> None:
    prompt = prompt_ids[3]
    parameters = SamplingParameters(
        temperature=0.7, seed=3, max_tokens=12, logprobs=5, prompt_logprobs=3, ignore_eos=True
    )
    done = engine.generate([prompt], parameters)[0]
    everything = [*prompt, *done.token_ids]
    with torch.no_grad():
        expected = plain(torch.tensor([everything])).logits[0].double().log_softmax(dim=-1)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    scored = [*done.prompt_logprobs[1:], *done.logprobs]
    assert len(scored) == len(everything) - 1
    for row, (token, entry) in enumerate(zip(everything[1:], scored, strict=True)):
        assert entry is not None
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert entry.rank == 1 + int((expected[row] > expected[row, token]).sum())
        top = [value for _, value in entry.top]
        assert top == sorted(top, reverse=True)
        for token_id, value in entry.top:
            assert value == pytest.approx(float(expected[row, token_id]), abs=1e-4)


# -- same seed, same tokens -----------------------------------------------------------------------


def _mixed_requests(prompt_ids: PromptIds, count: int) -> list[Request]:
    """Sequences that differ in every control, with fixed seeds."""
    kinds = [
        SAMPLED,
        GREEDY,
        replace(SAMPLED, top_k=40),
        replace(SAMPLED, top_p=0.9),
        replace(SAMPLED, min_p=0.05, temperature=1.0),
        replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
        replace(SAMPLED, top_k=50, top_p=0.95, logit_bias=((300, 2.0), (400, -5.0))),
    ]
    return [
        Request(
            f"r{i}",
            0,
            prompt_ids[i % len(prompt_ids)],
            replace(kinds[i % len(kinds)], seed=100 + i, max_tokens=24 + i % 17),
        )
        for i in range(count)
    ]


def _alone(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    return [_tokens(run_to_completion(engine, [request]))[0] for request in requests]


def test_alone_or_among_31_others_in_any_order(engine: Engine, prompt_ids: PromptIds) -> None:
    requests = _mixed_requests(prompt_ids, 32)
    expected = _alone(engine, requests)
    assert len(set(expected)) == len(expected)
    together = _tokens(run_to_completion(engine, requests))
    assert together == expected
    order = random.Random(5).sample(range(32), 32)
    shuffled = [requests[i] for i in order]
    result = _tokens(run_to_completion(engine, shuffled))
    assert result == [expected[i] for i in order]


def test_chunked_preempted_uncached_and_restarted(engine: Engine, prompt_ids: PromptIds) -> None:
    """Other step budgets, too few blocks, no prefix cache, another engine: the same tokens."""
    requests = _mixed_requests(prompt_ids, 16)
    expected = _tokens(run_to_completion(engine, requests))
    again = _tokens(run_to_completion(engine, requests))
    assert again == expected
    assert engine.statistics().cached_prompt_tokens > 0
    block_bytes = engine.information.kv_bytes // engine.information.kv_blocks
    for settings in (
        {"step_tokens": 7},
        {"prefix_cache": False},
        {"max_model_len": 512, "kv_cache_bytes": 36 * block_bytes},
        {"max_running": 3},
    ):
        other = demo_engine(**settings)
        result = _tokens(run_to_completion(other, requests))
        assert result == expected, settings
        other.check_idle()
        if "kv_cache_bytes" in settings:
            assert other.statistics().preemptions > 0


@pytest.mark.slow
def test_blocks_that_a_sequence_computed_itself_are_not_told_as_found(
    prompt_ids: PromptIds,
) -> None:
    """A preempted sequence finds its own blocks again: nothing of a new prompt was cached."""
    parameters = SamplingParameters(temperature=0.0, max_tokens=110, ignore_eos=True)
    requests = [Request(str(i), 0, (i, *prompt_ids[i][:60]), parameters) for i in range(4)]
    engine = demo_engine(step_tokens=64, max_model_len=176, kv_cache_bytes=20 * 65_536)
    events = heard(engine, requests)
    assert engine.statistics().preemptions > 0
    assert {event.cached_tokens for event in events} == {0}
    assert engine.statistics().cached_prompt_tokens == 0
    engine.close()


def test_replay_from_received_tokens_continues_the_same(
    engine: Engine, prompt_ids: PromptIds
) -> None:
    requests = _mixed_requests(prompt_ids, 14)
    expected = _tokens(run_to_completion(engine, requests))
    for received in (1, 9):
        resumed = [
            replace(request, resumed_ids=tokens[:received])
            for request, tokens in zip(requests, expected, strict=True)
        ]
        rest = _tokens(run_to_completion(engine, resumed))
        assert rest == [tokens[received:] for tokens in expected]


@pytest.mark.slow
def test_the_general_body_keeps_the_promise_too(engine: Engine, prompt_ids: PromptIds) -> None:
    general = demo_engine(body="general", step_tokens=50)
    assert general.information.batch_invariant
    requests = _mixed_requests(prompt_ids, 8)
    together = _tokens(run_to_completion(general, requests))
    assert together == _alone(general, requests)
    greedy = [request for request in requests if request.parameters.temperature == 0]
    fused = _alone(engine, greedy)
    assert [together[requests.index(request)] for request in greedy] == fused


# -- ends -----------------------------------------------------------------------------------------


def test_stops_at_stop_ids_eos_and_length(engine: Engine, prompt_ids: PromptIds) -> None:
    free = engine.generate([prompt_ids[1]], SAMPLED)[0].token_ids
    stop = next(token for token in free[5:] if token not in free[:5])
    place = free.index(stop)
    stopped = engine.generate([prompt_ids[1]], replace(SAMPLED, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == free[: place + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    later = replace(SAMPLED, stop_token_ids=(stop,), min_tokens=place + 2)
    delayed = engine.generate([prompt_ids[1]], later)[0]
    assert stop not in delayed.token_ids[: place + 2]
    assert engine.generate([prompt_ids[1]], SAMPLED)[0].finish_reason == "length"
    eos = engine.model.eos_token_ids[-1]
    forced = replace(SAMPLED, allowed_ids=(eos,), ignore_eos=False)
    ended = engine.generate([prompt_ids[1]], forced)[0]
    assert (ended.token_ids, ended.finish_reason) == ((eos,), "stop")


def test_bad_words_and_allowed_ids_hold(engine: Engine, prompt_ids: PromptIds) -> None:
    free = engine.generate([prompt_ids[2]], SAMPLED)[0].token_ids
    pair = free[3:5]
    without = engine.generate([prompt_ids[2]], replace(SAMPLED, bad_words=(pair,)))[0].token_ids
    assert pair not in pairwise(without)
    assert without[:4] == free[:4]
    allowed = tuple(sorted(set(free[:9])))
    inside = engine.generate([prompt_ids[2]], replace(SAMPLED, allowed_ids=allowed))[0].token_ids
    assert set(inside) <= set(allowed)


def test_impossible_requests_end_with_their_reason(engine: Engine, prompt_ids: PromptIds) -> None:
    too_long = engine.generate([prompt_ids[0]], replace(GREEDY, max_tokens=100_000))[0]
    assert too_long.finish_reason == "error"
    assert "exceed the context" in str(too_long.error)
    outside = engine.generate([(1, 16_384)], GREEDY)[0]
    assert "outside" in str(outside.error)
    everything = tuple((token,) for token in range(10))
    nothing_left = replace(GREEDY, allowed_ids=(3,), bad_words=everything)
    results = run_to_completion(
        engine,
        [
            Request("impossible", 0, prompt_ids[0], nothing_left),
            Request("fine", 0, prompt_ids[1], GREEDY),
        ],
    )
    assert results[0].finish_reason == "error"
    assert "every token is excluded" in str(results[0].error)
    assert results[1].error is None
    assert len(results[1].token_ids) == 64


def test_no_tokens_wanted_scores_the_prompt_alone(engine: Engine, prompt_ids: PromptIds) -> None:
    parameters = SamplingParameters(max_tokens=0, prompt_logprobs=0)
    done = engine.generate([prompt_ids[4]], parameters)[0]
    assert done.token_ids == ()
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == len(prompt_ids[4])


def test_text_in_text_out_and_stop_strings(engine: Engine, demo_tokenizer: Any) -> None:
    text = "Once upon a time there was"
    done = engine.generate([text, [1, 2, 3]], SAMPLED)
    assert done[0].prompt_ids == tuple(demo_tokenizer(text).input_ids)
    assert done[0].text == demo_tokenizer.decode(done[0].token_ids)
    word = done[0].text.split()[6]
    stopped = engine.generate([text], SAMPLED, stop=[word])[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert stopped.text == done[0].text[: done[0].text.index(word)]
    ids = done[0].token_ids
    ends = (end for end in range(len(ids) + 1) if word in demo_tokenizer.decode(ids[:end]))
    assert stopped.token_ids == ids[: next(ends)]
    engine.check_idle()


# -- tidy -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_cancelling_a_third_leaks_nothing(prompt_ids: PromptIds, count: int) -> None:
    """At random; survivors are right, blocks and memory come back."""
    engine = demo_engine(max_running=32, kv_cache_bytes=600 * 65_536)
    chance = random.Random(9)
    kinds = _mixed_requests(prompt_ids, 40)
    expected = _alone(engine, kinds)
    waiting = list(range(count))
    collectors: dict[str, Collector] = {}
    cancelled: set[str] = set()
    memory_at_half = 0
    while waiting or not engine._scheduler.idle:
        for _ in range(min(len(waiting), chance.randint(0, 4))):
            index = waiting.pop(0)
            request = replace(kinds[index % 40], request_id=f"{index}")
            collectors[request.request_id] = Collector(request)
            assert engine.submit(request) is None
        for event in engine.step():
            assert event.request_id not in cancelled, "a cancelled request must fall silent"
            collectors[event.request_id].take(event)
        alive = [name for name, each in collectors.items() if each.completion is None]
        alive = [name for name in alive if name not in cancelled]
        if alive and len(cancelled) * 3 < count - len(waiting):
            victim = chance.choice(alive)
            engine.cancel(victim)
            cancelled.add(victim)
        if not memory_at_half and len(waiting) < count // 2:
            memory_at_half = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine.check_idle()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_at_half
    assert grown < 50_000, f"memory grew by {grown} KB over the second half"
    outcomes = Counter()
    for name, collector in collectors.items():
        if name in cancelled:
            outcomes["cancelled"] += 1
            continue
        assert collector.completion is not None
        assert collector.completion.token_ids == expected[int(name) % 40]
        outcomes["right"] += 1
    assert outcomes["cancelled"] >= count // 4
    assert sum(outcomes.values()) == count


def test_threads_change_no_token(engine: Engine, prompt_ids: PromptIds) -> None:
    requests = _mixed_requests(prompt_ids, 9)
    expected = _tokens(run_to_completion(engine, requests))
    other = demo_engine(threads=3)
    try:
        assert _tokens(run_to_completion(other, requests)) == expected
    finally:
        pool.set_threads(1)
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cpu", {"no_compile": True}, "no GPU: --no-compile and --attention have no effect"),
        ("cpu", {"attention": "triton"}, "no GPU: --no-compile and --attention have no effect"),
        ("cpu", {"samplers": 2}, "loading the weights"),
        ("cuda", {"samplers": 2}, "--samplers halve every step, and each half reads all weights"),
    ],
)
def test_what_is_not_for_a_device_is_told_before_weights_are_read(
    device: str, setting: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lexshard.actors.engine.engine.choose_device", torch.device)
    with pytest.raises(Exception, match=r"absent|no CUDA device"):
        Engine(EngineConfiguration("absent", device=device, threads=1, **setting), tell=told.append)
    assert told[0].startswith(expected)
