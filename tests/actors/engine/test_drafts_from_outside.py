"""Guesses that come from outside: a sequence waits for them, and says what it would have said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.engine.several_steps import runs
from lexshard.actors.messages import (
    Commands,
    DraftDistribution,
    Drafting,
    Drafts,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from tests.support.paths import DEMO_DRAFT
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close
from tests.support.stepped_engines import Source

FALSE_ALARM = 1e-4
OUTSIDE = Drafting("client")
Guess = Callable[[Request, list[int]], Drafts]


def outside(request: Request, **changes: Any) -> Request:
    return replace(request, drafting=replace(OUTSIDE, **changes))


def drafts_of(request: Request, said: Sequence[int], *token_ids: int) -> Drafts:
    """Guesses right behind what has been said."""
    position = len(request.prompt_ids) + len(said)
    return Drafts(request.request_id, request.choice, position, token_ids)


def text_of(engine: Engine, request: Request) -> tuple[int, ...]:
    """What it says without guesses."""
    [completion] = run_to_completion(engine, [replace(request, drafting=Drafting())])
    return completion.token_ids


def run_with(
    engine: Engine, requests: Sequence[Request], guess: Guess
) -> dict[str, tuple[int, ...]]:
    """What each says, where every event is answered with the next ``guess``."""
    said: dict[str, list[int]] = {request.request_id: [] for request in requests}
    left = {request.request_id: request for request in requests}
    for request in requests:
        assert engine.submit(request) is None
    while left:
        for event in engine.step():
            said[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                del left[event.request_id]
            elif left[event.request_id].drafting.drafter == "client":
                engine.draft(guess(left[event.request_id], said[event.request_id]))
    engine.check_idle()
    engine.close()
    return {name: tuple(ids) for name, ids in said.items()}


def test_text_is_that_without_guesses_whatever_they_are(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """Right, half right, wrong and none, of every other sequence; beside a draft model's."""
    requests = requests_of(prompt_ids, 12)
    plain = run_and_close(drafting_engine(), requests)
    texts = {r.request_id: each.token_ids for r, each in zip(requests, plain, strict=True)}
    random = np.random.default_rng(3)

    def guess(request: Request, said: list[int]) -> Drafts:
        right = texts[request.request_id][len(said) :][: int(random.integers(0, 7))]
        wrong = random.integers(0, 16_000, int(random.integers(0, 3))).tolist()
        return drafts_of(request, said, *right, *wrong)

    mixed = [outside(each) if place % 2 else each for place, each in enumerate(requests)]
    for options in ({}, {"samplers": 2}):
        engine = drafting_engine(draft=str(DEMO_DRAFT), **options)
        assert run_with(engine, mixed, guess) == texts
        assert engine.statistics().draft_accepted_tokens > 50


def test_a_sequence_waits_for_its_guesses_while_others_go_on(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    parameters = SamplingParameters(max_tokens=12, ignore_eos=True, seed=5)
    waits = Request("waits", 0, prompt_ids[0][:30], parameters, drafting=OUTSIDE)
    other = Request("other", 0, prompt_ids[1][:30], parameters)
    engine = drafting_engine()
    text = text_of(engine, waits)
    engine.submit(waits)
    engine.submit(other)
    heard = [event for _ in range(20) for event in engine.step()]
    said = [id for each in heard if each.request_id == "waits" for id in each.token_ids]
    assert said == list(text[:1])
    assert sum(len(each.token_ids) for each in heard if each.request_id == "other") == 12
    [sequence] = engine.sequences("waits")
    assert engine.waits_for(sequence) == "drafts"
    assert engine.step() == []
    engine.check_idle()
    engine.draft(drafts_of(waits, said, *text[1:4]))
    [event] = engine.step()
    assert event.token_ids == text[1:5]
    assert engine.step() == []
    engine.draft(drafts_of(waits, text[:5]))  # no guess: one token
    [event] = engine.step()
    assert event.token_ids == text[5:6]
    engine.cancel("waits")
    assert engine.step() == []
    engine.check_idle()
    assert engine.statistics().kv_blocks_used == 0
    engine.close()


def test_what_it_draws_alone_takes_several_steps_by_one_call(
    monkeypatch: pytest.MonkeyPatch, prompt_ids: list[tuple[int, ...]]
) -> None:
    """As many tokens as were asked for behind the guess, and then it waits again."""
    for limit in ("MOST_SECONDS", "CALL_SECONDS"):  # however busy the machine is
        monkeypatch.setattr(runs, limit, 10.0)
    parameters = SamplingParameters(temperature=0.8, max_tokens=60, ignore_eos=True, seed=5)
    request = Request("alone", 0, prompt_ids[0][:30], parameters, drafting=OUTSIDE)
    engine = drafting_engine()
    text = text_of(engine, request)
    engine.submit(request)
    said = [token for _ in range(3) for event in engine.step() for token in event.token_ids]
    for alone in (20, 1, 0):
        engine.draft(replace(drafts_of(request, said, text[len(said)]), alone=alone))
        events = [event for _ in range(30) for event in engine.step()]
        assert len(events) <= 1 + -(-alone // 4)
        before = len(said)
        said += [token for event in events for token in event.token_ids]
        assert len(said) == before + 2 + alone
    assert said == list(text[: len(said)])
    assert engine.waits_for(engine.sequences("alone")[0]) == "drafts"
    engine.close()


def test_guesses_may_be_sent_ahead_of_the_verdict(prompt_ids: list[tuple[int, ...]]) -> None:
    """Those that guessed what was drawn meanwhile count on; a wrong one takes all behind it with
    it, and so does a gap."""
    parameters = SamplingParameters(max_tokens=30, ignore_eos=True, seed=5)
    request = Request("ahead", 0, prompt_ids[0][:30], parameters, drafting=OUTSIDE)
    engine = drafting_engine()
    [text] = (
        e.token_ids for e in run_to_completion(engine, [replace(request, drafting=Drafting())])
    )
    wrong = (text[14] + 1) % 16_000
    engine.submit(request)
    engine.draft(drafts_of(request, (), *text[:4]))  # the first is drawn before they are looked at
    engine.draft(drafts_of(request, text[:4], *text[4:8]))
    engine.draft(drafts_of(request, text[:8], *text[8:10], wrong))
    engine.draft(drafts_of(request, text[:10], wrong))
    told = [len(event.token_ids) for _ in range(12) for event in engine.step()]
    assert told == [1, 4, 4, 2]
    engine.draft(drafts_of(request, text[:12], text[12]))  # builds on a token that is not said
    assert engine.step() == []
    engine.draft(drafts_of(request, text[:11], *text[11:13]))
    assert [len(event.token_ids) for event in engine.step()] == [3]
    engine.close()


@pytest.mark.parametrize("late", [False, True])
def test_guesses_built_on_one_that_fell_take_no_step(
    prompt_ids: list[tuple[int, ...]], late: bool
) -> None:
    """Whether they come before or behind the verdict: they begin right behind what is said. What
    comes then is built on that."""
    parameters = SamplingParameters(max_tokens=30, ignore_eos=True, seed=5)
    request = Request("ahead", 0, prompt_ids[0][:30], parameters, drafting=OUTSIDE)
    engine = drafting_engine()
    text = text_of(engine, request)
    wrong = (text[3] + 1) % 16_000
    engine.submit(request)
    assert [len(event.token_ids) for event in engine.step()] == [1]
    engine.draft(drafts_of(request, text[:1], *text[1:3], wrong))
    behind = replace(drafts_of(request, text[:4], *text[4:6]), ahead=True)
    further = replace(drafts_of(request, text[:6], text[6]), ahead=True)
    told = []
    for each in (behind, further):
        if late:
            told += [len(event.token_ids) for _ in range(3) for event in engine.step()]
        engine.draft(each)
    told += [len(event.token_ids) for _ in range(3) for event in engine.step()]
    assert told == [3]
    engine.draft(drafts_of(request, text[:4], text[4]))
    engine.draft(replace(drafts_of(request, text[:5], text[5]), ahead=True))
    assert [len(event.token_ids) for _ in range(3) for event in engine.step()] == [2, 1]
    engine.close()


def test_one_that_gave_up_its_blocks_waits_for_its_guesses_still(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """There is room for six of eight: what others need is taken from those that wait."""
    parameters = SamplingParameters(max_tokens=60, ignore_eos=True, seed=5)
    requests = [Request(str(i), 0, prompt_ids[i][:60], parameters) for i in range(8)]
    few = {"kv_cache_bytes": 12 * 16 * 4 * 4096, "max_model_len": 128}
    plain = run_and_close(drafting_engine(**few), requests)
    texts = {r.request_id: each.token_ids for r, each in zip(requests, plain, strict=True)}
    engine = drafting_engine(**few)

    def guess(request: Request, said: list[int]) -> Drafts:
        return drafts_of(request, said, *texts[request.request_id][len(said) :][:2])

    assert run_with(engine, [outside(each) for each in requests], guess) == texts
    assert engine.statistics().preemptions > 0


def test_a_guess_that_cannot_be_tested_counts_as_none(prompt_ids: list[tuple[int, ...]]) -> None:
    parameters = SamplingParameters(max_tokens=9, ignore_eos=True, seed=5)
    requests = [
        outside(Request("token", 0, prompt_ids[0][:30], parameters)),
        outside(Request("sigmoid", 0, prompt_ids[0][:30], parameters), verify="sigmoid"),
    ]

    def guess(request: Request, said: list[int]) -> Drafts:
        unknown = 1 << 40 if request.request_id == "token" else 7
        return drafts_of(request, said, unknown)

    engine = drafting_engine()
    texts = run_with(engine, requests, guess)
    assert texts["token"] == texts["sigmoid"]
    assert engine.statistics().draft_tokens == 0
    with pytest.raises(ValueError, match="guess among its ids"):
        Drafts("token", 0, 3, (4,), (DraftDistribution((1, 2), (0.0, 0.0)),))
    with pytest.raises(ValueError, match="one distribution for each"):
        Drafts("token", 0, 3, (4, 5), (DraftDistribution((4,), (0.0,)),))


def test_lengths_and_modes_are_a_sequence_s_own(prompt_ids: list[tuple[int, ...]]) -> None:
    """One without guesses, one with one at a time, one tested by distributions: each says what an
    engine of this mode alone says."""
    parameters = SamplingParameters(temperature=0.9, max_tokens=40, ignore_eos=True, seed=5)
    request = Request("none", 0, prompt_ids[0][:40], replace(parameters, draft=True))
    wanted = [
        replace(request, drafting=Drafting("none")),
        replace(request, request_id="one", drafting=Drafting(most=1)),
        replace(request, request_id="law", drafting=Drafting(verify="same-distribution")),
        replace(request, request_id="five"),
        replace(request, request_id="zero", drafting=Drafting(most=0)),
    ]
    model = {"draft": str(DEMO_DRAFT), "draft_length": "fixed"}
    engine = drafting_engine(steps_at_once=1, **model)
    events: list[SequenceEvent] = []
    for each in wanted:
        engine.submit(each)
    while sum(event.finish_reason is not None for event in events) < len(wanted):
        events.extend(engine.step())
    engine.close()
    told = {
        each.request_id: [e for e in events if e.request_id == each.request_id] for each in wanted
    }
    texts = {name: [id for event in own for id in event.token_ids] for name, own in told.items()}
    assert texts["none"] == texts["one"] == texts["five"] == texts["zero"]
    law = drafting_engine(verify="same-distribution", **model)
    [completion] = run_and_close(law, [request])
    assert texts["law"] == list(completion.token_ids) != texts["none"]
    for name in ("none", "zero"):
        assert max(len(event.token_ids) for event in told[name]) == 1
    assert max(len(event.token_ids) for event in told["one"]) == 2
    assert max(len(event.token_ids) for event in told["five"]) > 2


@pytest.mark.slow
def test_tokens_follow_the_target_whatever_outside_guesses_were_drawn_from(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """The second of two tokens, its guess drawn from three of four ids the target may say and one
    it may not: chi-square, by the first token."""
    parameters = SamplingParameters(temperature=1.2, top_k=4, max_tokens=3, ignore_eos=True)
    prompt = prompt_ids[3][:20]
    plain = [Request(str(s), 0, prompt, replace(parameters, seed=s)) for s in range(3000)]
    seen: dict[tuple[int, int], int] = {}
    for completion in run_and_close(drafting_engine(), plain):
        pair = completion.token_ids[0], completion.token_ids[1]
        seen[pair] = seen.get(pair, 0) + 1
    random = np.random.default_rng(8)
    after = {first: sorted(second for one, second in seen if one == first) for first, _ in seen}

    def guess(request: Request, said: list[int]) -> Drafts:
        ids = (*after[said[0]][:3], 15_999)
        shares = np.array([0.2, 0.1, 0.5, 0.2][: len(ids)])
        shares /= shares.sum()
        token = int(random.choice(ids, p=shares))
        proposal = DraftDistribution(ids, tuple(np.log(shares).tolist()))
        return replace(drafts_of(request, said, token), proposals=(proposal,))

    wanted = [outside(each, verify="same-distribution", most=1) for each in plain]
    texts = run_with(drafting_engine(), wanted, guess)
    found: dict[tuple[int, int], int] = {}
    for text in texts.values():
        found[text[0], text[1]] = found.get((text[0], text[1]), 0) + 1
    pairs = [pair for pair in seen if seen[pair] + found.get(pair, 0) >= 20]
    table = [[seen[pair] for pair in pairs], [found.get(pair, 0) for pair in pairs]]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM
    assert sum(seen[pair] for pair in pairs) > 2900 < sum(found.get(pair, 0) for pair in pairs)


def test_guesses_that_come_with_their_request_are_heard(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """Through the loop, where a request begins after its commands have been read."""
    parameters = SamplingParameters(max_tokens=6, ignore_eos=True, seed=5)
    request = Request("early", 0, prompt_ids[0][:30], parameters, drafting=OUTSIDE)
    engine = drafting_engine()
    [text] = (
        e.token_ids for e in run_to_completion(engine, [replace(request, drafting=Drafting())])
    )
    told: list[SequenceEvent] = []

    early = drafts_of(request, (), *text)

    def commands() -> Iterator[Commands | None]:
        yield Commands((request,), drafts=(early,))
        while not told or told[-1].finish_reason is None:
            yield None

    def emit(output: StepOutput) -> None:
        told.extend(output.events)

    run_engine(engine, Source(commands()), emit)
    assert [len(event.token_ids) for event in told] == [1, 5]
    engine.close()
