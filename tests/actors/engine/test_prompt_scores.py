"""Prompts are scored once, a few rows a step, whichever leaves; and salts keep prompts apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.decision.sampler import token_logprobs
from lexshard.actors.engine import scoring
from lexshard.actors.engine.completion import Collector, Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import Commands
from lexshard.actors.engine.prompt_scores import SCORED_ROW_TOKENS, PromptScores, SharedScores
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.demo_engine import demo_engine
from tests.support.quick import slow

PromptIds = list[tuple[int, ...]]

SCORED = SamplingParameters(
    temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=7
)
CHOICES = 4


def make_engine(**settings: Any) -> Engine:
    return demo_engine(**{"step_tokens": 128, **settings})


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.check_idle()


@pytest.fixture
def scored_rows(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each position of a prompt was scored, by the id of the token there."""
    rows: Counter[int] = Counter()

    def counting(raw: Any, token_ids: Any, counts: Any) -> Any:
        rows.update(token_ids.tolist())
        return token_logprobs(raw, token_ids, counts)

    monkeypatch.setattr(scoring, "token_logprobs", counting)
    return rows


def choices(prompt: tuple[int, ...], count: int = CHOICES) -> list[Request]:
    return [Request(f"c{choice}", choice, prompt, SCORED) for choice in range(count)]


@pytest.fixture(scope="module")
def prompt(prompt_ids: PromptIds) -> tuple[int, ...]:
    """150 tokens, none of them twice."""
    return tuple(dict.fromkeys(token for ids in prompt_ids for token in ids))[:150]


@pytest.fixture(scope="module")
def expected(engine: Engine, prompt: tuple[int, ...]) -> list[Completion]:
    """Each choice alone: nothing is shared."""
    return [run_to_completion(engine, [request])[0] for request in choices(prompt)]


# -- once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefix_cache": False},
        slow({"step_tokens": 7}),
        slow({"samplers": 1}),
    ],
    ids=str,
)
def test_the_choices_of_a_prompt_are_scored_once(
    expected: list[Completion],
    prompt: tuple[int, ...],
    scored_rows: Counter[int],
    settings: dict[str, object],
) -> None:
    """And every one of them is told what it would be told alone."""
    engine = make_engine(**settings)
    try:
        assert run_to_completion(engine, choices(prompt)) == expected
        assert scored_rows == Counter(prompt[1:])
        engine.check_idle()
    finally:
        engine.close()


def test_what_was_scored_before_a_preemption_stays(
    expected: list[Completion], prompt: tuple[int, ...], scored_rows: Counter[int]
) -> None:
    """A stream that came first takes the blocks of those that are being scored."""
    engine = make_engine(step_tokens=20, max_model_len=176, kv_cache_bytes=14 * 65_536)
    stream = replace(SCORED, prompt_logprobs=None, logprobs=None, max_tokens=110)
    requests = [Request("stream", 0, prompt[:60], stream), *choices(prompt)]
    assert run_to_completion(engine, requests)[1:] == expected
    assert scored_rows == Counter(prompt[1:])
    assert engine.statistics().preemptions > 0
    engine.check_idle()


@pytest.mark.parametrize("steps", [1, 3, 6, 8])
def test_a_choice_that_leaves_takes_no_scores_along(
    engine: Engine,
    expected: list[Completion],
    prompt: tuple[int, ...],
    scored_rows: Counter[int],
    steps: int,
) -> None:
    """The first choice is cancelled while it is scored; the next goes on where it was."""
    requests = choices(prompt)
    collectors = [Collector(request) for request in requests[1:]]
    for request in requests:
        engine.submit(request)
    for step in range(400):
        if step == steps:
            engine.cancel("c0")
        for event in engine.step():
            if event.choice:
                collectors[event.choice - 1].take(event)
    assert [collector.completion for collector in collectors] == expected[1:]
    assert scored_rows == Counter(prompt[1:])


def test_a_prompt_that_was_scored_before_is_scored_again(
    engine: Engine, expected: list[Completion], prompt: tuple[int, ...]
) -> None:
    """Scores are kept as long as a request wants them, blocks longer."""
    again = run_to_completion(engine, choices(prompt, 1))
    assert again == expected[:1]
    other = replace(SCORED, prompt_logprobs=2)
    fewer = run_to_completion(engine, [*choices(prompt), Request("x", 0, prompt, other)])[-1]
    assert fewer.prompt_logprobs is not None
    for few, many in zip(fewer.prompt_logprobs, again[0].prompt_logprobs or (), strict=True):
        assert (few and few.top) == (many and many.top[:2])


def test_a_prompt_of_one_token_has_nothing_to_be_scored(engine: Engine) -> None:
    done = run_to_completion(engine, [Request("one", 0, (5,), SCORED)])[0]
    assert done.prompt_logprobs == (None,)


# -- a few rows a step ----------------------------------------------------------------------------


def test_a_scored_prompt_holds_no_other_up(
    engine: Engine, prompt_ids: PromptIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step costs more than its budget, and another client's two tokens take three steps."""
    long = tuple(token for ids in prompt_ids for token in ids)[:1_500]
    for request in choices(long, 6):
        engine.submit(replace(request, client="long"))
    engine.step()
    engine.submit(Request("short", 0, (5, 6, 7), SamplingParameters(max_tokens=2), client="short"))
    costs: list[int] = []
    plan = engine._scheduler.plan

    def planned() -> Any:
        made = plan()
        rows = sum(len(chunk.scored) for chunk in made.chunks)
        costs.append(made.tokens + rows * (SCORED_ROW_TOKENS - 1))
        return made

    monkeypatch.setattr(engine._scheduler, "plan", planned)
    finished = []
    while not engine._scheduler.idle:
        for event in engine.step():
            if event.request_id == "short" and event.finish_reason:
                finished.append(len(costs))
    assert max(costs) < 128 + SCORED_ROW_TOKENS
    assert 0 < finished[0] <= 3


@given(
    length=st.integers(1, 60),
    most_likely=st.integers(0, 100),
    scored=st.integers(0, 60),
    start=st.integers(0, 60),
    budget=st.integers(1, 300),
)
def test_as_many_tokens_as_the_budget_pays_for(
    length: int, most_likely: int, scored: int, start: int, budget: int
) -> None:
    scores = PromptScores(length, most_likely, [None] * (1 + min(scored, length - 1)))
    count = scores.affordable(start, budget)
    assert count >= 1
    assert count == 1 or scores.cost(start, count) <= budget
    assert scores.cost(start, count + 1) > budget


@pytest.mark.slow
def test_few_choices_are_told_their_prompt_in_one_step(engine: Engine) -> None:
    """What a step says must be read, too, before a client hears of the next one."""
    parameters = replace(SCORED, prompt_logprobs=20, max_tokens=2)
    prompt = tuple(range(1_900))
    for choice in range(12):
        engine.submit(Request(f"t{choice}", choice, prompt, parameters))
    told = []
    while not engine._scheduler.idle:
        told.append(sum(event.prompt_logprobs is not None for event in engine.step()))
    assert sum(told) == 12
    assert max(told) == 1  # 266 tokens' worth, of 128 that a step has


def test_scores_are_shared_by_requests_that_want_the_same_and_then_forgotten() -> None:
    shared = SharedScores()
    request = Request("a", 0, (1, 2, 3), SCORED)
    first = shared.of(request)
    assert first is not None
    assert shared.of(replace(request, request_id="b", choice=1)) is first
    assert shared.of(replace(request, cache_salt="other")) is not first
    assert shared.of(replace(request, prompt_ids=(1, 2))) is not first
    assert shared.of(replace(request, parameters=replace(SCORED, prompt_logprobs=1))) is not first
    assert shared.of(replace(request, parameters=replace(SCORED, prompt_logprobs=None))) is None
    assert shared.of(replace(request, resumed_ids=(4,))) is None
    first.entries.append(None)
    del first
    again = shared.of(request)
    assert again is not None
    assert again.entries == [None]


# -- salts ----------------------------------------------------------------------------------------


def test_salts_share_no_blocks_and_see_no_hits(engine: Engine, prompt: tuple[int, ...]) -> None:
    plain = replace(SCORED, prompt_logprobs=None, logprobs=None)

    def cached(salt: str) -> int:
        request = Request("s", 0, prompt[::-1], plain, cache_salt=salt)
        engine.submit(request)
        told = []
        while not engine._scheduler.idle:
            told += engine.step()
        tokens.add(tuple(token for event in told for token in event.token_ids))
        return told[-1].cached_tokens

    tokens: set[tuple[int, ...]] = set()
    assert [cached(salt) for salt in ("", "one", "two")] == [0, 0, 0]
    assert [cached(salt) for salt in ("one", "two", "")] == [144, 144, 144]
    assert len(tokens) == 1, "a salt changes no token"


def test_a_prompt_of_another_salt_is_not_waited_for(
    engine: Engine, prompt: tuple[int, ...]
) -> None:
    plain = replace(SCORED, prompt_logprobs=None, logprobs=None)
    for salt in ("red", "red", "blue"):
        engine.submit(Request(f"w-{salt}", 0, prompt[:60], plain, cache_salt=salt))
    plan = engine._scheduler.plan()
    assert [chunk.sequence.request.cache_salt for chunk in plan.chunks] == ["red", "blue"]
    for salt in ("red", "blue"):
        engine.cancel(f"w-{salt}")


def test_client_and_salt_cross_the_wire() -> None:
    request = Request("a", 0, (1, 2), SCORED, client="key-1", cache_salt="secret")
    wire = msgspec.msgpack.encode(Commands(submit=(request,)))
    assert msgspec.msgpack.decode(wire, type=Commands).submit == (request,)
    bare = {"request_id": "a", "choice": 0, "prompt_ids": (1,), "parameters": {}}
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(bare), type=Request)
    assert (old.client, old.cache_salt) == ("", "")
