"""Steps taken in a row, before clients hear of any, say what so many steps say one by one."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.fair_share import FairShare
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.engine.several_steps import runs
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.head import plain_steps
from lexshard.actors.messages import (
    Commands,
    Drafting,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from lexshard.kernels import ahead
from lexshard.kernels.ahead import SEVERAL_STEPS
from lexshard.kernels.certified import Rows
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.masks import count_of
from lexshard.kernels.steps import AskedRows, Places, StepsTaken
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO_DRAFT
from tests.support.stepped_engines import Source, WatchedMatcher, events_of, heard

PLAIN = SamplingParameters(temperature=1.0, max_tokens=45, ignore_eos=True, seed=3)
TOLD = replace(PLAIN, certificate=True, receipt=True, draft=True)
KINDS = {
    "greedy": replace(TOLD, temperature=0.0),
    "drawn": TOLD,
    "top-k and min-p": replace(TOLD, top_k=40, min_p=0.02),
    "top-p": replace(TOLD, top_p=0.9),
    "top-k and top-p": replace(TOLD, top_k=50, top_p=0.9),
    "penalties": replace(TOLD, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    "ends": replace(TOLD, ignore_eos=False, stop_token_ids=tuple(range(100, 400))),
    # Each step of these takes several calls.
    "log-probabilities": replace(PLAIN, logprobs=2),
    "bias and bans": replace(TOLD, logit_bias=((11, 3.0),), bad_words=((5, 6), (300,))),
    "a minimum": replace(TOLD, min_tokens=20, stop_token_ids=(1, 2, 3)),
    "few ids": replace(TOLD, allowed_ids=tuple(range(3000))),
}


@pytest.fixture(autouse=True)
def _however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, and what one call takes of it, is as long on a slow machine."""
    monkeypatch.setattr(runs, "MOST_SECONDS", 10.0)
    monkeypatch.setattr(runs, "CALL_SECONDS", 10.0)


# Of one tier: which of several screens is timed, beside whatever else runs, and remembered.
@pytest.fixture(scope="module")
def singly() -> Iterator[Engine]:
    engine = demo_engine(head="certified", tiers=("int8",), steps_at_once=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def together() -> Iterator[Engine]:
    engine = demo_engine(head="certified", tiers=("int8",), steps_at_once=5)
    yield engine
    engine.close()


def replies(events: list[SequenceEvent]) -> dict[str, tuple[object, ...]]:
    """What was said, why it ended, and what was told of each token."""
    told: dict[str, tuple[object, ...]] = {}
    for name in {each.request_id for each in events}:
        own = [each for each in events if each.request_id == name]
        told[name] = (
            [token for each in own for token in each.token_ids],
            own[-1].finish_reason,
            own[-1].stop_reason,
            [one for each in own for one in each.logits],
            [one for each in own for one in each.logprobs],
            [one for each in own for one in each.origins],
            [(one.need, one.guarantee) for each in own for one in each.certificates],
        )
    return told


def most_at_once(events: list[SequenceEvent]) -> int:
    return max(len(each.token_ids) for each in events)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_says_the_same(
    kind: str, singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    for index, prompt in enumerate(prompt_ids[:3]):
        request = Request(f"{kind}-{index}", 0, prompt[: 20 + index], KINDS[kind])
        expected, found = heard(singly, [request]), heard(together, [request])
        assert replies(found) == replies(expected)
        assert most_at_once(expected) == 1
        assert most_at_once(found) > 1


@pytest.mark.parametrize("kinds", [range(len(KINDS)), range(7)], ids=["all", "plain ones"])
def test_sequences_beside_each_other_say_the_same(
    kinds: range, singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    wanted = [
        Request(kind, 0, prompt[:50], replace(parameters, max_tokens=20 + 3 * index, seed=index))
        for index, (prompt, (kind, parameters)) in enumerate(
            zip(prompt_ids, KINDS.items(), strict=False)
        )
        if index in kinds
    ]
    found = heard(together, wanted)
    assert replies(found) == replies(heard(singly, wanted))
    assert most_at_once(found) > 1


def test_steps_and_certificates_are_counted_as_ever(prompt_ids: list[tuple[int, ...]]) -> None:
    counted = []
    for count in (1, 8):
        engine = demo_engine(head="certified", steps_at_once=count)
        for length in (30, 1, 17, 17):
            heard(engine, [Request("a", 0, prompt_ids[0][:length], KINDS["drawn"])])
        now = engine.statistics()
        assert now.prompt_tokens + now.cached_prompt_tokens == now.finished_prompt_tokens
        observed = {phase: sum(seen[:-1]) for phase, seen in now.step_seconds.items()}
        counted.append((now.steps, now.generated_tokens, now.head_rows, observed))
        assert now.body_seconds > 0 < now.head_seconds
        engine.close()
    assert counted[0] == counted[1]


@pytest.mark.parametrize("kind", ["greedy", "drawn", "top-k and min-p", "top-p"])
def test_what_one_call_takes_costs_and_is_certified_as_ever(
    kind: str, singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    """To the bytes that were read and the tightness of bounds."""
    request = Request("certified", 0, prompt_ids[4][:30], KINDS[kind])
    each, all_at_once = (
        [one for event in heard(engine, [request]) for one in event.certificates]
        for engine in (singly, together)
    )
    assert all_at_once == each


def test_a_run_ends_where_something_is_asked(prompt_ids: list[tuple[int, ...]]) -> None:
    """A newcomer waits for one step, and one that is cancelled says no more."""
    engine = demo_engine(head="certified", steps_at_once=8)
    first = Request("first", 0, prompt_ids[0][:20], replace(PLAIN, max_tokens=400))
    second = Request("second", 0, prompt_ids[1][:20], replace(PLAIN, max_tokens=4))
    told: list[tuple[str, int]] = []
    looks = itertools.count(1)

    def commands() -> Iterator[Commands | None]:
        yield Commands((first,))
        for tokens, command in ((30, Commands((second,))), (60, Commands(cancel=("first",)))):
            while sum(size for _, size in told) <= tokens:
                yield None
            yield command
        while engine.sequences("first") or engine.sequences("second"):
            yield None

    def emit(output: StepOutput) -> None:
        told.extend((each.request_id, len(each.token_ids)) for each in output.events)

    def comes() -> bool:
        return next(looks) % 11 == 0

    run_engine(engine, Source(commands()), emit, report_seconds=0.01, asked=comes)
    assert max(size for _, size in told) > 1
    assert sum(size for name, size in told if name == "second") == 4
    assert sum(size for name, size in told if name == "first") < 200
    engine.check_idle()
    engine.close()


def test_asking_is_looked_for_after_every_step(
    together: Engine, prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a call, too."""
    monkeypatch.setattr(runs, "CALL_SECONDS", 0.0)
    looks = itertools.count(1)
    together.steps.asked = lambda: next(looks) % 3 == 0
    try:
        events = heard(together, [Request("asked", 0, prompt_ids[0][:30], PLAIN)])
    finally:
        together.steps.asked = lambda: False
    assert {len(each.token_ids) for each in events[1:-1]} == {3}


def test_a_run_takes_no_longer_than_clients_may_wait(
    together: Engine, prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_SECONDS", 0.0)
    events = heard(together, [Request("slow", 0, prompt_ids[0][:30], PLAIN)])
    assert most_at_once(events) == 1


def test_runs_go_on_while_others_wait_for_a_place(
    prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None gets one before a run ends. Clients pay for what they get as by single steps."""
    charge, paid = FairShare.charge, Counter[tuple[int, str]]()

    def paying(share: FairShare, client: str, cost: int) -> None:
        paid[count, client] += cost
        charge(share, client, cost)

    monkeypatch.setattr(FairShare, "charge", paying)
    wanted = [Request(f"r{i}", 0, prompt_ids[i][:40], PLAIN, client="ab"[i % 2]) for i in range(6)]
    told = []
    for count in (1, 8):
        engine = demo_engine(head="certified", steps_at_once=count, max_running=2)
        events = heard(engine, wanted)
        told.append(replies(events))
        engine.close()
    assert told[0] == told[1]
    assert {each.request_id for each in events if len(each.token_ids) > 1} == set(told[0])
    assert all(paid[1, client] == paid[8, client] > 4 * 45 for client in "ab")


def test_a_text_that_waits_for_its_guesses_ends_no_run_of_others(
    singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    """Nor the rest of a rule, which guesses nothing for it."""
    waits = Request("waits", 0, prompt_ids[0][:30], PLAIN, drafting=Drafting("client"))
    other = Request("other", 0, prompt_ids[1][:30], PLAIN)
    guessing = demo_engine(head="certified", steps_at_once=5, draft=str(DEMO_DRAFT))
    assert guessing._speculation is not None
    guessing._speculation._rules = Resting(), Resting()  # type: ignore[assignment]
    for engine in (together, guessing):
        assert engine.submit(waits) is None
        events = [each for each in heard(engine, [other]) if each.request_id == "other"]
        engine.cancel("waits")
        assert replies(events) == replies(heard(singly, [other]))
        assert most_at_once(events) == 5
    guessing.close()


def test_no_run_is_longer_than_there_are_blocks(
    prompt_ids: list[tuple[int, ...]], singly: Engine
) -> None:
    """Sequences give up their blocks to others."""
    wanted = [Request(f"r{i}", 0, prompt_ids[i][:40], PLAIN) for i in range(6)]
    expected = replies(heard(singly, wanted))
    room = {"max_model_len": 176, "kv_cache_bytes": 20 * 65_536}
    tight = demo_engine(head="certified", steps_at_once=8, **room)
    events = heard(tight, wanted)
    assert replies(events) == expected
    assert tight.statistics().preemptions > 0
    assert most_at_once(events) > 1
    tight.close()


def test_what_a_run_computed_is_shared_as_ever(prompt_ids: list[tuple[int, ...]]) -> None:
    """Its blocks have names, the last of a text that has ended, too."""
    cached = []
    for count in (1, 8):
        engine = demo_engine(head="certified", steps_at_once=count)
        [*_, last] = events = heard(engine, [Request("a", 0, prompt_ids[0][:30], PLAIN)])
        said = [token for each in events for token in each.token_ids]
        assert last.finish_reason == "length"
        follow_up = (*prompt_ids[0][:30], *said, 7, 8, 9)
        [first, *_] = heard(engine, [Request("b", 0, follow_up, PLAIN)])
        cached.append(first.cached_tokens)
        engine.close()
    assert cached[0] == cached[1] == (30 + 45 - 1) // 16 * 16


@pytest.mark.parametrize("length", ["fixed", "measured"])
def test_guesses_change_nothing(
    length: str, singly: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    """Runs are of steps for which nothing is guessed."""
    engine = demo_engine(
        head="certified", steps_at_once=8, draft=str(DEMO_DRAFT), draft_length=length
    )
    engine.warm_up()
    wanted = [Request(f"r{i}", 0, prompt_ids[i][:40], PLAIN) for i in range(3)]
    wanted.append(replace(wanted[0], request_id="unguessed", drafting=Drafting("none")))
    assert replies(heard(engine, wanted)) == replies(heard(singly, wanted))
    alone = heard(engine, [wanted[3]])
    assert most_at_once(alone) == 8
    engine.close()


class Resting:
    """A rule that guesses nothing, and rests for some steps each time; every step is heard of."""

    def __init__(self) -> None:
        self.asked = self.rested = self.resting = 0

    def lengths(self, sequences: list[int], rooms: list[int], greedy: list[int]) -> list[int]:
        self.asked += 1
        self.resting = 19
        return [0] * len(sequences)

    def rest(self, steps: int) -> None:
        self.rested += steps
        self.resting -= steps
        assert self.resting >= 0

    def step_took(self, rows: int, seconds: float, steps: int = 1) -> None:
        assert rows <= 2

    def forget(self, sequence: int) -> None: ...


def test_a_rule_that_rests_hears_of_every_step_of_a_run(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """But of none in which nothing would have been guessed anyway."""
    engine = demo_engine(head="certified", steps_at_once=8, draft=str(DEMO_DRAFT))
    assert engine._speculation is not None
    rule = Resting()
    engine._speculation._rules = rule, rule  # type: ignore[assignment]
    guessed = [Request(f"r{i}", 0, prompt_ids[i][:20], PLAIN) for i in range(2)]
    alone = replace(guessed[0], request_id="alone", drafting=Drafting("none"))
    for wanted in ([guessed[0]], [alone], guessed, [alone], [guessed[1]]):
        assert most_at_once(heard(engine, wanted)) == 8
    steps = 3 * (PLAIN.max_tokens - 1)  # the first token comes with the prompt
    assert steps - 19 <= rule.asked + rule.rested <= steps + 3
    engine.close()


@pytest.mark.parametrize("several", [False, True], ids=["steps", "calls"])
def test_a_body_that_overflows_in_a_run_ends_the_sequence_with_its_reason(
    several: bool, prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one place, in steps one by one and in a call that takes several."""
    engine = demo_engine(head="certified", steps_at_once=8)
    monkeypatch.setattr(ahead, "_postponed", set() if several else {SEVERAL_STEPS})
    forward, take = engine.model.body.forward, plain_steps.take_steps

    def overflowing(batch: Batch) -> torch.Tensor:
        hidden = forward(batch)
        return hidden * torch.nan if int(batch.positions[-1]) >= 41 else hidden

    def overflowing_steps(
        stack: LlamaStack, rows: Rows, asked: AskedRows, places: Places, *others: Any
    ) -> StepsTaken:
        fine = min(places.steps, 41 - int(places.first[0]))
        if fine > 0:
            return take(stack, rows, asked, places._replace(steps=fine), *others)
        stack.weights.final_norm[:] = np.nan
        return take(stack, rows, asked, places, *others)

    engine.model.body.forward = overflowing  # type: ignore[method-assign]
    monkeypatch.setattr(plain_steps, "take_steps", overflowing_steps)
    events = heard(engine, [Request("a", 0, prompt_ids[0][:30], PLAIN)])
    assert sum(len(each.token_ids) for each in events) == 12
    assert events[-1].finish_reason == "error"
    assert "NaN" in str(events[-1].error)
    engine.close()


STRING = 'start: /"[a-z ]*"/'
ALTERNATING = "start: /([a-z ]{9}[0-9])+/"
REFRAIN = "start: /([a-z]{3} and so it went for ever )+/"
RECORDS = """{"grammars": [{"json_schema": {"type": "array", "minItems": 9, "items": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
    "happy": {"type": "boolean"}}, "required": ["name", "happy"],
    "additionalProperties": false}}}]}"""


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("grammar", [STRING, RECORDS], ids=["string", "records"])
def test_texts_under_a_grammar_are_the_same(
    grammar: str,
    logprobs: int | None,
    singly: Engine,
    together: Engine,
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """Until a grammar says what must follow; alone and beside others, with and without one."""
    masked = replace(TOLD, ignore_eos=False, grammar=grammar, logprobs=logprobs, max_tokens=60)
    if logprobs is not None:
        masked = replace(masked, receipt=False)
    for seed in range(3):
        wanted = [
            Request(f"r{i}", 0, prompt[:30], replace(parameters, seed=seed))
            for i, (prompt, parameters) in enumerate(
                zip(prompt_ids, (masked, PLAIN, replace(masked, top_p=0.9)), strict=False)
            )
        ]
        for some in (wanted[:1], wanted):
            found = heard(together, some)
            assert as_text(replies(found)) == as_text(replies(heard(singly, some)))
            assert most_at_once(found) > 1


def as_text(told: dict[str, tuple[object, ...]]) -> str:
    """Equal where all that was told is: the logits of what a grammar says are no numbers."""
    return repr(sorted(told.items()))


def test_a_grammar_that_fails_in_a_run_ends_its_own_sequence(
    singly: Engine,
    together: Engine,
    prompt_ids: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masked = replace(PLAIN, ignore_eos=False, grammar=STRING)
    other = Request("other", 0, prompt_ids[1][:30], PLAIN)
    expected = replies(heard(singly, [other]))
    [alone, *_] = replies(heard(singly, [Request("", 0, prompt_ids[0][:30], masked)]))[""]
    for several, method in itertools.product((False, True), ("consume", "masks", "write_mask")):
        monkeypatch.setattr(ahead, "_postponed", set() if several else {SEVERAL_STEPS})
        for others in ([other], []):
            if method != "consume" and (method == "write_mask") != several:
                continue  # so are masks made in calls that take several steps, behind the first
            assert together.submit(Request("fails", 0, prompt_ids[0][:30], masked)) is None
            [sequence] = together.sequences("fails")
            sequence.matcher = failing(sequence.matcher, method)
            assert [together.submit(each) for each in others] == [None] * len(others)
            # On a busy machine masks are late, and the other one ends before it.
            told = replies(
                list(events_of(together, "fails", *(each.request_id for each in others)))
            )
            said, reason = told.pop("fails")[:2]
            assert reason == "error"
            if method == "consume":  # what was drawn before is told, however many come at once
                assert said == alone[:6]  # type: ignore[index]
            assert told == (expected if others else {})


def failing(matcher: Any, failing_method: str) -> Any:
    """Says what ``matcher`` says, until a method has been called so often, and then no more."""
    calls = Counter[str]()

    def fails(method: str) -> None:
        calls[method] += 1
        if calls[failing_method] >= 6:
            raise GrammarError("it has lost its way")

    return WatchedMatcher(matcher, fails)


WIDE_STRING = 'start: /"[^"\\\\\\x00-\\x1f]*"/'
DRAWN_FROM_ALL = {
    "greedy": replace(PLAIN, temperature=0.0),
    "drawn": PLAIN,
    "penalties": replace(PLAIN, repetition_penalty=1.2, presence_penalty=0.3),
    "bias and bans": replace(PLAIN, logit_bias=((11, 3.0),), bad_words=((5, 6), (300,))),
}


@pytest.mark.parametrize(
    "grammar",
    [STRING, WIDE_STRING, RECORDS, REFRAIN],
    ids=["a-z", "any", "records", "refrain"],
)
def test_a_call_that_takes_several_steps_draws_what_each_mask_allows(
    grammar: str, singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    """Each kind alone, and all of them beside others, which leave one after the other."""
    masked: dict[str, Any] = {"ignore_eos": False, "grammar": grammar}
    wanted = [
        Request(kind, 0, prompt[:30], replace(each, **masked, seed=seed, max_tokens=30 + 9 * seed))
        for seed, ((kind, each), prompt) in enumerate(
            zip(DRAWN_FROM_ALL.items(), prompt_ids, strict=False)
        )
    ]
    told = replace(wanted[1], request_id="told", parameters=replace(TOLD, **masked))
    nucleus = replace(told, request_id="nucleus", parameters=replace(PLAIN, **masked, top_p=0.9))
    plain = Request("plain", 0, prompt_ids[5][:30], PLAIN)
    for some in ([wanted[0]], [wanted[1]], [wanted[2]], [wanted[3]], wanted):
        again = [*some, told, nucleus, plain] if some is wanted else some
        found = heard(together, again)
        assert as_text(replies(found)) == as_text(replies(heard(singly, again)))
        assert most_at_once(found) > 1


def test_a_call_leaves_few_tokens_of_a_large_head_to_others(
    singly: Engine,
    together: Engine,
    prompt_ids: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which compute these alone."""
    monkeypatch.setattr(plain_steps, "SCREENED_BESIDE", 0)
    few = together.information.vocabulary_size // 64
    take, ended = plain_steps.take_steps, Counter[bool]()

    def noting(*given: Any) -> StepsTaken:
        taken, caller = take(*given), given[-1]
        assert caller.fewest == few  # see `kernels.steps.Caller`
        narrow = any(count_of(each) <= few for each in caller.masks)
        assert not narrow or (taken.hidden is not None and taken.left is None)
        ended[narrow] += bool(taken.tokens)
        return taken

    monkeypatch.setattr(plain_steps, "take_steps", noting)
    asked = replace(PLAIN, ignore_eos=False, grammar=ALTERNATING, max_tokens=60)
    for count in (1, 3):
        wanted = [
            Request(f"r{i}", 0, prompt_ids[i][:30], replace(asked, seed=i)) for i in range(count)
        ]
        expected = replies(heard(singly, wanted))
        assert replies(heard(together, wanted)) == expected
    assert ended[True]


def test_what_must_follow_is_computed_inside_a_call(
    singly: Engine,
    together: Engine,
    prompt_ids: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the tokens that it follows, and counted as where it ends a run."""
    take, drawn = plain_steps.take_steps, list[int]()

    def counting(*given: Any) -> StepsTaken:
        taken = take(*given)
        drawn.append(sum(map(len, taken.tokens)))
        return taken

    monkeypatch.setattr(plain_steps, "take_steps", counting)
    asked = replace(PLAIN, ignore_eos=False, grammar=REFRAIN, max_tokens=60)
    for count in (1, 3):
        wanted = [
            Request(f"r{i}", 0, prompt_ids[i][:30], replace(asked, seed=i)) for i in range(count)
        ]
        told = []
        for engine in (singly, together):
            before = engine.statistics().forced_tokens
            found = heard(engine, wanted)
            forced = engine.statistics().forced_tokens - before
            told.append((sum(len(each.token_ids) for each in found), forced))
        assert told[0] == told[1]
        tokens, forced = told[0]
        assert forced > 20
        # Hardly a token is drawn elsewhere; a call goes on behind what must follow.
        assert sum(drawn) > 0.7 * (tokens - forced)
        assert max(drawn) >= 3 * count
        drawn.clear()


def test_where_what_must_follow_is_banned_nothing_else_is_drawn(
    singly: Engine,
    together: Engine,
    prompt_ids: list[tuple[int, ...]],
    demo_tokenizer: Any,
) -> None:
    """Other tokens would begin the same text: a grammar accepts them, its mask does not."""
    the, blank = demo_tokenizer.convert_tokens_to_ids(["\u0120the", "\u0120"])
    asked = replace(PLAIN, ignore_eos=False, grammar="start: /[a-z]{30} the end/")
    asked = replace(asked, bad_words=((the,),), logit_bias=((blank, 60.0),))
    for seed in range(4):
        request = Request("a", 0, prompt_ids[seed][:30], replace(asked, seed=seed))
        [expected] = replies(heard(singly, [request])).values()
        assert expected[1] == "error"
        assert replies(heard(together, [request])) == {"a": expected}


def test_a_late_mask_ends_the_run_and_nothing_else(
    singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    masked = replace(PLAIN, ignore_eos=False, grammar=STRING)
    wanted = [Request(f"r{i}", 0, prompt_ids[i][:30], replace(masked, seed=i)) for i in range(3)]
    expected = replies(heard(singly, wanted))
    for each in wanted:
        assert together.submit(each) is None
        [sequence] = together.sequences(each.request_id)
        sequence.matcher = slow(sequence.matcher)
    events = list(events_of(together, *(each.request_id for each in wanted)))
    assert replies(events) == expected
    assert most_at_once(events) > 1


def slow(matcher: Any) -> Any:
    """Says what ``matcher`` says, masks at times after a while, and nothing else meanwhile."""
    masks, busy = itertools.count(1), list[str]()

    def waits(method: str) -> None:
        assert not busy, f"{method} is asked while a mask is made"
        if method == "masks":
            busy.append(method)
            if next(masks) % 7 == 0:
                time.sleep(0.02)

    return WatchedMatcher(matcher, waits, busy.clear)
