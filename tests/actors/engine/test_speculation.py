"""Drafters in the engine: guesses change when tokens come, never which, whatever is guessed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lexshard.actors.drafter.length import FixedLength
from lexshard.actors.drafter.lookup import LookupDrafter
from lexshard.actors.drafter.task import Draft
from lexshard.actors.engine.completion import Collector, Completion, run_to_completion
from lexshard.actors.engine.speculation import CostTiming, Speculation
from lexshard.actors.messages import Drafting, Request, SamplingParameters
from lexshard.kernels import ahead
from lexshard.kernels.ahead import GUESSING
from tests.support.paths import DEMO_DRAFT
from tests.support.quick import quick, slow
from tests.support.speculation_cases import (
    Guesses,
    Says,
    drafting_engine,
    requests_of,
    run_and_close,
)
from tests.support.stepped_engines import heard

BLOCK_BYTES = 65_536  # of keys and values of 16 tokens
MODEL = {"draft": str(DEMO_DRAFT)}
DRAFTERS: dict[str, dict[str, Any]] = {
    "full head": {**MODEL, "draft_head": "full"},
    "certified head": {**MODEL, "draft_head": "certified"},
    "static head": {**MODEL, "draft_head": "static", "draft_length": "stepping"},
    "router": {**MODEL, "draft_head": "router", "draft_tokens": 3},
    "measured": {**MODEL, "draft_length": "measured"},
    "far": {**MODEL, "draft_tokens": 9},
    "look-up": {"draft": "ngram"},
    "greedy": {**MODEL, "verify": "greedy"},
    "samplers": {**MODEL, "samplers": 2},
    "little room": {**MODEL, "kv_cache_bytes": 12 * BLOCK_BYTES},
}


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 24)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    """What is said without a drafter: tokens, reasons and log-probabilities, to the last bit."""
    return run_and_close(drafting_engine(), requests)


@pytest.fixture(scope="module")
def truth(plain: list[Completion]) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {each.prompt_ids: each.token_ids for each in plain}


@pytest.mark.parametrize("count", [24, slow(500)])
@pytest.mark.parametrize("name", quick(DRAFTERS, *(DRAFTERS.keys() - {"samplers"})))
def test_the_text_is_that_without_a_drafter(
    prompt_ids: list[tuple[int, ...]], plain: list[Completion], name: str, count: int
) -> None:
    asked = requests_of(4 * prompt_ids, count)
    expected = plain if count == len(plain) else run_and_close(drafting_engine(), asked)
    assert run_and_close(drafting_engine(**DRAFTERS[name]), asked) == expected


@pytest.mark.parametrize(
    ("share", "changes"),
    [
        (0.0, {}),
        (0.6, {}),
        (1.0, {}),
        (0.7, {"kv_cache_bytes": 12 * BLOCK_BYTES}),
        (0.7, {"prefix_cache": False, "step_tokens": 24}),
        slow(0.7, {"samplers": 2}),
        slow(0.7, {"samplers": 2, "sampler_placement": "processes"}),
        (0.7, {"head": "dense"}),
    ],
    ids=str,
)
def test_guesses_of_any_quality_change_no_token(
    requests: list[Request],
    plain: list[Completion],
    truth: dict[tuple[int, ...], tuple[int, ...]],
    share: float,
    changes: dict[str, Any],
) -> None:
    drafter = Guesses(truth, share)
    engine = drafting_engine(drafter, **changes)
    assert run_and_close(engine, requests) == plain
    assert drafter.right + drafter.wrong > 150
    if "kv_cache_bytes" in changes:
        assert engine.statistics().preemptions > 0


def test_a_draft_model_that_has_seen_the_same_text_saves_steps(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    parameters = SamplingParameters(temperature=0.8, max_tokens=60, ignore_eos=True, seed=3)
    requests = [Request(str(i), 0, prompt_ids[i][:40], parameters) for i in range(4)]
    engine = drafting_engine(**MODEL)
    completions = run_and_close(engine, requests)
    statistics = engine.statistics()
    assert completions == run_and_close(drafting_engine(), requests)
    assert statistics.draft_tokens > statistics.draft_accepted_tokens > 60
    assert statistics.draft_steps < 0.7 * statistics.generated_tokens


def test_a_drafter_may_begin_while_sequences_are_served(
    requests: list[Request],
    plain: list[Completion],
    truth: dict[tuple[int, ...], tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Guesses(truth, 0.7)
    engine = drafting_engine(drafter)
    monkeypatch.setattr(ahead, "_postponed", {GUESSING})
    engine.warm_up()
    assert not drafter.right + drafter.wrong
    collectors = {each.request_id: Collector(each) for each in requests}
    for request in requests:
        assert engine.submit(request) is None
    steps = 0
    while any(each.completion is None for each in collectors.values()):
        for event in engine.step():
            collectors[event.request_id].take(event)
        steps += 1
        if steps == 5:
            assert not drafter.right + drafter.wrong
            monkeypatch.setattr(ahead, "_postponed", set())
    assert [each.completion for each in collectors.values()] == plain
    assert drafter.right + drafter.wrong > 100
    engine.close()


def test_guesses_on_which_tokens_depend_are_made_from_the_first_on(
    prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = SamplingParameters(temperature=0.7, max_tokens=20, ignore_eos=True)
    drafting = Drafting(verify="same-distribution")
    request = Request("a", 0, prompt_ids[0][:30], parameters, drafting=drafting)
    ready, not_yet = drafting_engine(**MODEL), drafting_engine(**MODEL)
    expected = run_and_close(ready, [request])
    monkeypatch.setattr(ahead, "_postponed", {GUESSING})
    not_yet.warm_up()
    assert run_and_close(not_yet, [request]) == expected
    assert not_yet.statistics().draft_tokens > 0


def test_each_token_tells_what_guessed_it_or_what_was_guessed_instead(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    parameters = SamplingParameters(temperature=0.7, max_tokens=40, ignore_eos=True, draft=True)
    requests = [Request("asks", 0, prompt_ids[0][:30], parameters)]
    requests.append(Request("does not", 0, prompt_ids[1][:30], replace(parameters, draft=False)))
    engine = drafting_engine(**MODEL)
    events = heard(engine, requests)
    engine.close()
    told = [event for event in events if event.request_id == "asks"]
    assert all(len(event.origins) == len(event.token_ids) for event in told)
    assert not any(event.origins for event in events if event.request_id != "asks")
    origins = [origin for event in told for origin in event.origins]
    tokens = [token for event in told for token in event.token_ids]
    none, name = sorted({origin.drafted_by for origin in origins}, key=bool)
    assert none is None
    assert engine.information.drafts.startswith(name)
    assert any(origin.rejected is not None for origin in origins)
    for origin, token in zip(origins, tokens, strict=True):
        assert origin.rejected != token
        assert origin.drafted_by is None or origin.rejected is None
    plain = heard(without := drafting_engine(), requests[:1])
    without.close()
    assert {origin.drafted_by for event in plain for origin in event.origins} == {None}


def test_a_step_costs_what_is_done_between_steps_too(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients are told after every step, and once after a run of them: guesses, which end runs,
    are not to look cheaper than they are. What was waited for is no cost."""
    now, took = [1.0], list[float]()
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    engine = drafting_engine(Guesses({}, 0.0), draft_length="measured")
    try:
        speculation = engine._speculation
        assert speculation is not None
        monkeypatch.setattr(ahead, "_postponed", {GUESSING})
        monkeypatch.setattr("lexshard.actors.engine.steps.time", clock)
        monkeypatch.setattr(speculation, "step_took", lambda plan, seconds: took.append(seconds))
        for seconds in (2.0, 3.0):
            engine.submit(requests[0])
            while engine.sequences(requests[0].request_id):
                engine.step()
                now[0] += seconds
            assert took[0] == 0.0
            assert set(took[1:]) == {seconds}
            engine.step()  # there is nothing to do
            took.clear()
    finally:
        engine.close()


def test_requests_that_are_not_greedy_are_not_drafted_for_where_that_is_the_mode(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    sampled = SamplingParameters(temperature=0.7, max_tokens=20, ignore_eos=True)
    engine = drafting_engine(**MODEL, verify="greedy")
    run_to_completion(engine, [Request("a", 0, prompt_ids[0][:30], sampled)])
    assert engine.statistics().draft_tokens == 0
    run_to_completion(
        engine, [Request("b", 0, prompt_ids[0][:30], replace(sampled, temperature=0))]
    )
    assert engine.statistics().draft_tokens > 0
    engine.close()


def test_a_draft_head_without_a_draft_model_is_refused() -> None:
    with pytest.raises(ValueError, match="leave --draft-head out"):
        drafting_engine(draft="ngram", draft_head="router")
    with pytest.raises(ValueError, match="give --draft FOLDER"):
        drafting_engine(draft=None, draft_head="router")


CHEAP = [
    *(CostTiming("step", rows, 1 + rows / 100) for rows in (1, 2, 3, 6)),
    CostTiming("drafting", 1, 0.01),
]


@pytest.mark.parametrize("known", [[], CHEAP])
@pytest.mark.parametrize("reads", [False, True])
def test_a_drafter_that_has_nothing_to_say_is_soon_hardly_asked(
    monkeypatch: pytest.MonkeyPatch, known: list[CostTiming], reads: bool
) -> None:
    """So that steps are taken in runs. One that has not read its prompt yet is asked again."""
    engine = drafting_engine(
        Says(lambda task: Draft(reads=reads)),
        draft_length="measured",
        max_model_len=512,
        steps_at_once=1,
    )
    speculation = engine._speculation
    assert speculation is not None
    speculation.restart(known)
    if known:  # else what steps take here is learnt, too
        monkeypatch.setattr(speculation, "step_took", lambda plan, seconds: None)
    engine.submit(Request("a", 0, (5, 6, 7), SamplingParameters(max_tokens=400, ignore_eos=True)))
    for _ in range(200):
        engine.step()
    [sequence], free = engine.sequences("a"), []
    for _ in range(100):
        engine.step()
        free.append(speculation.steps_without([sequence]) or 0)
    rests = sum(steps > 1 for steps in free)
    assert rests == 0 if reads else rests > 50
    engine.close()


@pytest.mark.parametrize("room", [2, 3, 4, 5, 6, 20])
def test_a_sequence_that_has_nothing_left_to_say_ends_whether_guessed_for_or_not(
    room: int,
) -> None:
    """Where the last guess stood, too, and the token after it cannot be had."""
    parameters = SamplingParameters(
        max_tokens=room, allowed_ids=(11,), bad_words=((11,) * 4,), ignore_eos=True
    )
    requests = [Request(f"{n}", n, (5, 6, 7), replace(parameters, seed=n)) for n in range(3)]
    requests.append(Request("goes on", 0, (5, 6, 7), SamplingParameters(max_tokens=40)))
    plain = ended(drafting_engine(), requests)
    assert [error is not None for _, error in plain] == [room > 3] * 3 + [False]
    certain = Says(lambda task: Draft([11] * task.most))  # the one token that may come
    for drafter, changes in ((certain, {"draft_tokens": 3}), (None, {"draft": "ngram"})):
        assert ended(drafting_engine(drafter, **changes), requests) == plain


def ended(engine: Any, requests: list[Request]) -> list[tuple[tuple[int, ...], str | None]]:
    """The tokens of each, and why it could not go on; at most 200 steps."""
    try:
        collectors = [Collector(request) for request in requests]
        names = [(request.request_id, request.choice) for request in requests]
        for request in requests:
            assert engine.submit(request) is None
        for _ in range(200):
            for event in engine.step():
                collectors[names.index((event.request_id, event.choice))].take(event)
        engine.check_idle()
        completions = [collector.completion for collector in collectors]
        assert None not in completions, "never ended"
        return [(each.token_ids, each.error) for each in completions if each is not None]
    finally:
        engine.close()


def test_costs_are_medians_by_the_steps_of_each() -> None:
    """The first run loads a kernel, and takes a hundred times as long."""
    speculation = Speculation(LookupDrafter(), lambda _: FixedLength(2))
    speculation.forced_length = 0
    for seconds, steps in ((2.0, 4), (0.03, 8), (0.08, 1), (0.04, 1)):
        speculation._took(CostTiming("step", 1, seconds, steps=steps))
    speculation._took(CostTiming("step", 2, 5.0))
    first, second = speculation.timings
    assert (first.size, first.seconds, first.steps) == (1, 0.03, 4)
    assert (second.size, second.seconds, second.steps) == (2, 5.0, 1)
