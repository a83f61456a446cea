"""Grammars in the engine: what is said is masked decoding, however few rows and steps it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import llguidance
import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.constraints import LONG_TOKENS
from lexshard.actors.engine.engine import Engine
from lexshard.actors.grammar import grammars
from lexshard.actors.grammar.grammars import Grammars
from lexshard.actors.grammar.matcher import GrammarError, Matcher
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.messages import Request, SamplingParameters, SequenceEvent
from lexshard.actors.text.codec import TextCodec
from lexshard.cluster.samplers.start import start_sampler
from lexshard.kernels.masks import ids_of
from tests.support.demo_engine import demo_engine
from tests.support.grammar_cases import (
    GRAMMARS,
    OTHERS,
    SCHEMAS,
    VOCABULARY,
    MaskedDecoding,
    ends_well,
    grammar_requests,
    told,
)
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.quick import quick
from tests.support.speculation_cases import Guesses, run_and_close
from tests.support.stepped_engines import WatchedMatcher, events_of, said_by
from tests.support.thread_shards import ThreadShards

COUNT = 39
FREE_OF_DIGITS = llguidance.LLMatcher.grammar_from_regex(r"[^0-9]{5,40}!")
BLOCK_BYTES = 65_536  # of keys and values of 16 tokens
CONTEXT = {"max_model_len": 128}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense head": {"head": "dense"},
    "draft model": {"draft": str(DEMO_DRAFT)},
    "look-up": {"draft": "ngram"},
    "samplers": {"samplers": 2},
    "little room": {"kv_cache_bytes": 12 * BLOCK_BYTES, "draft": str(DEMO_DRAFT)},
    "short steps": {"prefix_cache": False, "step_tokens": 24},
}
MASKING = ("masks", "write_mask")
Said = list[tuple[tuple[int, ...], str]]


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return grammar_requests(prompt_ids, COUNT)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> Said:
    engine = demo_engine(head="dense", **CONTEXT)
    try:
        return MaskedDecoding(engine).say(requests)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = demo_engine(**CONTEXT)
    yield engine
    engine.check_idle()
    engine.close()


@pytest.mark.parametrize("name", quick(ENGINES, "plain", "draft model", "short steps"))
def test_what_is_said_is_masked_decoding(
    requests: list[Request], expected: Said, name: str
) -> None:
    assert told(run_and_close(demo_engine(**CONTEXT, **ENGINES[name]), requests)) == expected


def test_shards_of_which_one_gives_all_of_its_tokens_say_masked_decoding() -> None:
    """Where nearly all may be drawn of what the grammar allows, in one half of the vocabulary."""
    parameters = SamplingParameters(
        temperature=2.0, min_p=1e-4, max_tokens=10, grammar=FREE_OF_DIGITS
    )
    asked = [
        Request(str(seed), 0, (20 + seed, 300 + seed, 17), replace(parameters, seed=seed))
        for seed in range(24)
    ]
    dense = demo_engine(head="dense", dtype="auto", **CONTEXT)
    truth = MaskedDecoding(dense).say(asked)
    dense.close()
    halves = EngineConfiguration(
        str(DEMO), device="cpu", threads=1, shards=2, shard_assignment="blocks-contiguous"
    )
    engine = Engine(halves, start_sampler, None, ThreadShards(halves))
    assert told(run_and_close(engine, asked)) == truth


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_guesses_change_nothing(requests: list[Request], expected: Said, share: float) -> None:
    truth = {request.prompt_ids: ids for request, (ids, _) in zip(requests, expected, strict=True)}
    drafter = Guesses(truth, share)
    engine = demo_engine(drafter, draft_length="fixed", **CONTEXT)
    assert told(run_and_close(engine, requests)) == expected
    assert bool(drafter.right) == bool(share)


def test_a_guess_at_which_the_grammar_gives_up_ends_nothing(
    requests: list[Request], expected: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is drawn, the grammar is asked again."""
    goes_on, asked = Matcher._goes_on_with, count()

    def gives_up(matcher: Matcher, token_id: int) -> bool:
        if next(asked) % 3 == 2:
            raise GrammarError("it costs too much")
        return goes_on(matcher, token_id)

    monkeypatch.setattr(Matcher, "_goes_on_with", gives_up)
    truth = {request.prompt_ids: ids for request, (ids, _) in zip(requests, expected, strict=True)}
    engine = demo_engine(Guesses(truth, 0.9), draft_length="fixed", **CONTEXT)
    assert told(run_and_close(engine, requests)) == expected
    assert next(asked) > 30


def instances(said: Said) -> int:
    """How many outputs under schemas have ended; raises where one is no instance of its schema."""
    codec = TextCodec.load(str(DEMO))
    assert codec is not None
    ended = 0
    for index, (token_ids, reason) in enumerate(said):
        schema = index % len(GRAMMARS)
        if reason == "stop" and schema < len(SCHEMAS):
            detokenizer = codec.detokenizer((), 0)
            for token_id in token_ids[:-1]:
                detokenizer.push(token_id)
            ends_well(detokenizer.finish(), SCHEMAS[schema])
            ended += 1
    return ended


def test_what_has_ended_is_an_instance(expected: Said) -> None:
    assert instances(expected) >= 5


@pytest.mark.parametrize("verify", ["same-distribution", "sigmoid"])
def test_what_has_ended_is_an_instance_where_guesses_are_tested(
    requests: list[Request], expected: Said, verify: str
) -> None:
    """The tokens are others then."""
    drafting = {"draft": str(DEMO_DRAFT), "draft_length": "fixed", "verify": verify}
    engine = demo_engine(**CONTEXT, **drafting)
    said = told(run_and_close(engine, requests))
    assert engine.statistics().draft_accepted_tokens > 50
    assert said != expected
    assert instances(said) >= 5


def test_an_output_that_is_forced_takes_no_step(engine: Engine) -> None:
    steps = engine.steps.counters.steps
    text = 'start: "one certain word"'
    asked = SamplingParameters(max_tokens=60, grammar=text, certificate=True, draft=True)
    event = engine.submit(Request("word", 0, (5, 6), asked))
    assert event is not None
    assert event.finish_reason == "stop"
    assert {each.need for each in event.certificates} == {"forced"}
    assert {each.drafted_by for each in event.origins} == {"grammar"}
    assert len(event.certificates) == len(event.token_ids) == len(event.origins)
    assert engine.steps.counters.steps == steps
    engine.check_idle()


@pytest.mark.parametrize("name", ["plain", "look-up", "samplers"])
def test_a_long_constant_keeps_no_other_sequence_waiting(name: str) -> None:
    """Of 40 KB few tokens come at once, and the others go on between them."""
    engine = demo_engine(**ENGINES[name])
    certain = "one certain word and then another of it all, said the fox. " * 700
    grammar = f'start: /[ab]/ "{certain}"'
    asked = SamplingParameters(max_tokens=120, grammar=grammar, certificate=True)
    other = SamplingParameters(max_tokens=400, seed=2, ignore_eos=True)
    assert engine.submit(Request("long", 0, (5, 6), asked)) is None
    assert engine.submit(Request("other", 0, (5, 9), other)) is None
    matcher = engine._grammars.matcher(grammar)
    said: list[int] = []
    others = most = 0
    while len(said) < 120:
        for event in engine.step():
            assert event.error is None
            if event.request_id == "long":
                said.extend(event.token_ids)
                forced = [each.need for each in event.certificates].count("forced")
                assert forced <= LONG_TOKENS
                most = max(most, forced)
            else:
                others += 1
    assert most == LONG_TOKENS
    assert others >= 120 // (LONG_TOKENS + 1) - 1
    for token_id in said:
        [words] = matcher.masks(())
        assert token_id in ids_of(words, VOCABULARY)
        matcher.consume((token_id,))
    engine.cancel("other")
    engine.step()
    engine.check_idle()
    engine.close()


def test_an_output_that_was_cut_goes_on_the_same(requests: list[Request], expected: Said) -> None:
    """As after the death of an engine, wherever it came."""
    engine = demo_engine(**CONTEXT)
    cut = [
        replace(request, resumed_ids=ids[: (place * 7) % len(ids)])
        for place, (request, (ids, _)) in enumerate(zip(requests, expected, strict=True))
    ]
    for request, (ids, reason), completion in zip(
        cut, expected, run_and_close(engine, cut), strict=True
    ):
        assert completion.error is None
        assert request.resumed_ids + completion.token_ids == ids
        assert completion.finish_reason == reason


def test_what_cannot_be_asked_is_refused(engine: Engine) -> None:
    for grammar in ("start: (", 'start: "a" & "b"', "%json {]"):
        event = engine.submit(Request("bad", 0, (5,), SamplingParameters(grammar=grammar)))
        assert event is not None
        assert event.refused
        assert event.error
    for changes in ({"ignore_eos": True}, {"min_tokens": 2}, {"allowed_ids": (1, 2)}):
        asked = SamplingParameters(grammar=OTHERS[0], **changes)  # type: ignore[arg-type]
        event = engine.submit(Request("bad", 0, (5,), asked))
        assert event is not None
        assert event.refused
        assert event.error is not None
        assert next(iter(changes)) in event.error
    engine.check_idle()


def test_a_grammar_that_loses_its_way_ends_its_own_sequence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that alone: the others say what they say without it."""
    asked = SamplingParameters(temperature=1.0, max_tokens=12, seed=5, grammar=OTHERS[1])
    good = Request("good", 0, (5, 6, 7), asked)
    [alone] = run_to_completion(engine, [good])
    poor = replace(asked, bad_words=tuple((each,) for each in range(16_384)))
    first, second = run_to_completion(
        engine, [replace(good, request_id="poor", parameters=poor), good]
    )
    assert first.finish_reason == "error"
    assert first.error is not None
    assert "excluded" in first.error
    assert second.token_ids == alone.token_ids
    engine.check_idle()


def test_a_grammar_that_fails_later_ends_its_own_sequence(engine: Engine) -> None:
    asked = SamplingParameters(temperature=1.0, max_tokens=12, seed=5, grammar=OTHERS[1])
    good = Request("good", 0, (5, 6, 7), asked)
    [alone] = run_to_completion(engine, [good])
    assert engine.submit(replace(good, request_id="failing")) is None
    [sequence] = engine.sequences("failing")
    made = count()

    def fails(method: str) -> None:
        if method in MASKING and next(made) >= 3:
            raise GrammarError("the grammar costs too much here")

    sequence.matcher = WatchedMatcher(sequence.matcher, fails)  # type: ignore[assignment]
    assert engine.submit(good) is None
    events = list(events_of(engine, "failing", "good"))
    [failure] = [each for each in events if each.finish_reason == "error"]
    assert failure.request_id == "failing"
    assert failure.refused
    assert said_by("failing", events) == alone.token_ids[:3]
    assert said_by("good", events) == alone.token_ids
    engine.check_idle()


def slow_matcher(matcher: Any, others: threading.Event) -> Any:
    """Says what ``matcher`` says, of masks not before ``others`` have gone on."""
    return WatchedMatcher(matcher, lambda method: method in MASKING and others.wait(30))


def test_a_slow_mask_keeps_no_other_sequence_waiting(engine: Engine) -> None:
    slow = Request(
        "slow",
        0,
        (5, 6),
        SamplingParameters(temperature=1.0, max_tokens=3, seed=1, grammar=OTHERS[1]),
    )
    [expected] = run_to_completion(engine, [slow])
    other = Request("other", 0, (5, 9), SamplingParameters(max_tokens=40, seed=2, ignore_eos=True))
    assert engine.submit(slow) is None
    [sequence] = engine.sequences("slow")
    gone_on = threading.Event()
    sequence.matcher = slow_matcher(sequence.matcher, gone_on)
    assert engine.submit(other) is None
    events: list[SequenceEvent] = []
    for event in events_of(engine, "slow", "other"):
        events.append(event)
        if len(events) > 12:
            gone_on.set()
    own = [each.request_id for each in events for _ in each.token_ids]
    assert own.count("other") == 40
    assert own.index("slow") > 10  # the others had gone on
    assert said_by("slow", events) == expected.token_ids
    engine.check_idle()


def test_a_place_that_is_lost_while_a_mask_is_late_is_found_again() -> None:
    """Of a prompt of one token nothing can be computed before its mask is there."""
    engine = demo_engine(max_running=2, **CONTEXT)
    asked = SamplingParameters(temperature=1.0, max_tokens=5, seed=1, grammar=OTHERS[1])
    slow = Request("slow", 0, (7,), asked, client="a")
    [expected] = run_to_completion(engine, [slow])
    free = SamplingParameters(max_tokens=90, ignore_eos=True)
    assert engine.submit(Request("long", 0, (5, 6), free, client="a")) is None
    assert engine.submit(slow) is None
    [sequence] = engine.sequences("slow")
    there = threading.Event()
    sequence.matcher = slow_matcher(sequence.matcher, there)
    while not sequence.masking:
        engine.step()
    newcomer = Request("new", 0, (9, 8), replace(free, max_tokens=1), client="b")
    assert engine.submit(newcomer) is None
    list(events_of(engine, "new"))
    for _ in range(3):
        engine.step()
    there.set()
    events = islice(events_of(engine, "slow", "long"), 300)
    assert said_by("slow", events) == expected.token_ids
    engine.check_idle()
    engine.close()


def test_more_grammars_than_are_remembered_are_all_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look at one that had been forgotten began it again, and forgot the next."""
    monkeypatch.setattr(grammars, "REMEMBERED", 3)
    kept = Grammars(str(DEMO), VOCABULARY, (0,))
    waiting = [f'start: "choice {number}"' for number in range(12)]
    deadline = time.monotonic() + 60
    while waiting and time.monotonic() < deadline:
        waiting = [each for each in waiting if not kept.ready(each, 0.0)]
    assert not waiting
    assert kept.ready('start: "one more"', 10)
    assert len(kept._known) <= 4
    kept.close()


def test_a_grammar_that_failed_is_made_anew_for_the_next() -> None:
    """Copies share what they have found out, and the limit of that."""
    kept = Grammars(str(DEMO), VOCABULARY, (0,))
    first, other = kept.matcher('start: "a"'), kept.matcher('start: "a"')
    made = kept._known['start: "a"']
    with pytest.raises(GrammarError):
        first.consume((300,))
    assert other.forced() is not None
    assert kept.matcher('start: "a"').forced() == other.forced()
    assert kept._known['start: "a"'] is not made
    kept.close()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_an_engine_rests_whose_late_sequence_has_ended(engine: Engine, how: str) -> None:
    asked = SamplingParameters(temperature=1.0, max_tokens=3, seed=1, grammar=OTHERS[1])
    cancelled = threading.Event()
    for name in ("slow", "other"):
        assert engine.submit(Request(name, 0, (5, 6), asked)) is None
        [sequence] = engine.sequences(name)
        sequence.matcher = slow_matcher(sequence.matcher, cancelled)
    while not any(engine.sequences(name)[0].masking for name in ("slow", "other")):
        engine.step()
    for name in ("slow", "other"):
        [sequence] = engine.sequences(name)
        if how == "cancelled":
            engine.cancel(name)
        else:
            error = NonFiniteHiddenError([0])
            engine.steps.booking._event(sequence, 0, (), reason="error", error=error)
    progress = engine.steps.run(lambda plan: lambda: engine.steps.forward(plan))
    assert any(next(progress).idle for _ in range(3))
    cancelled.set()
    engine.check_idle()
