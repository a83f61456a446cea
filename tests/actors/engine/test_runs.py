"""Steps taken in a row, before clients hear of any, say what so many steps say one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.engine.several_steps import runs
from lexshard.actors.messages import (
    Commands,
    Drafting,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO_DRAFT

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
    # These are decided step by step; one with a minimum until it has that.
    "log-probabilities": replace(PLAIN, logprobs=2),
    "bias and bans": replace(TOLD, logit_bias=((11, 3.0),), bad_words=((5, 6), (300,))),
    "a minimum": replace(TOLD, min_tokens=20, stop_token_ids=(1, 2, 3)),
    "few ids": replace(TOLD, allowed_ids=tuple(range(3000))),
}
ONE_BY_ONE = {"log-probabilities", "bias and bans", "few ids"}


@pytest.fixture(autouse=True)
def _however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is as long on a slow machine."""
    monkeypatch.setattr(runs, "MOST_SECONDS", 10.0)


@pytest.fixture(scope="module")
def singly() -> Iterator[Engine]:
    engine = demo_engine(head="certified", steps_at_once=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def together() -> Iterator[Engine]:
    engine = demo_engine(head="certified", steps_at_once=5)
    yield engine
    engine.close()


def heard(engine: Engine, requests: list[Request]) -> list[SequenceEvent]:
    """All that is told of them, asked for at once."""
    events = [event for each in requests if (event := engine.submit(each)) is not None]
    while sum(each.finish_reason is not None for each in events) < len(requests):
        events.extend(engine.step())
    engine.check_idle()
    return events


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
        assert (most_at_once(found) > 1) == (kind not in ONE_BY_ONE)


@pytest.mark.parametrize("left_out", [set(), ONE_BY_ONE], ids=["all kinds", "plain kinds"])
def test_sequences_beside_each_other_say_the_same(
    left_out: set[str], singly: Engine, together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
    wanted = [
        Request(kind, 0, prompt[:50], replace(parameters, max_tokens=20 + 3 * index, seed=index))
        for index, (prompt, (kind, parameters)) in enumerate(
            zip(prompt_ids, KINDS.items(), strict=False)
        )
        if kind not in left_out
    ]
    found = heard(together, wanted)
    assert replies(found) == replies(heard(singly, wanted))
    assert (most_at_once(found) > 1) == bool(left_out)


def test_steps_and_certificates_are_counted_as_ever(prompt_ids: list[tuple[int, ...]]) -> None:
    counted = []
    for count in (1, 8):
        engine = demo_engine(head="certified", steps_at_once=count)
        heard(engine, [Request("a", 0, prompt_ids[0][:30], KINDS["drawn"])])
        now = engine.statistics()
        observed = {phase: sum(seen[:-1]) for phase, seen in now.step_seconds.items()}
        counted.append((now.steps, now.generated_tokens, now.head_rows, now.head_bytes, observed))
        assert now.body_seconds > 0 < now.head_seconds
        engine.close()
    assert counted[0] == counted[1]


def test_a_run_ends_where_something_is_asked(prompt_ids: list[tuple[int, ...]]) -> None:
    """A newcomer waits for one step, and one that is cancelled says no more."""
    engine = demo_engine(head="certified", steps_at_once=8)
    first = Request("first", 0, prompt_ids[0][:20], replace(PLAIN, max_tokens=400))
    second = Request("second", 0, prompt_ids[1][:20], replace(PLAIN, max_tokens=4))
    told: list[tuple[str, int]] = []
    asked = [Commands((first,)), Commands((second,)), Commands(cancel=("first",))]
    looks = itertools.count(1)

    class Source:
        def receive(self, wait_seconds: float) -> Commands | None:
            if len(asked) == 3 or self.comes():
                return asked.pop(0)
            idle = wait_seconds > 0 and not asked
            return Commands(stop=True) if idle else None

        def comes(self) -> bool:
            said = sum(size for _, size in told)
            return bool(asked) and said > 60 / len(asked)

    def emit(output: StepOutput) -> None:
        told.extend((each.request_id, len(each.token_ids)) for each in output.events)

    def comes() -> bool:
        return next(looks) % 11 == 0

    run_engine(engine, Source(), emit, report_seconds=0.01, asked=comes)
    assert max(size for _, size in told) > 1
    assert sum(size for name, size in told if name == "second") == 4
    assert sum(size for name, size in told if name == "first") < 200
    engine.check_idle()
    engine.close()


def test_asking_is_looked_for_after_every_step(
    together: Engine, prompt_ids: list[tuple[int, ...]]
) -> None:
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


def test_no_run_begins_while_others_wait_or_blocks_are_few(
    prompt_ids: list[tuple[int, ...]], singly: Engine
) -> None:
    wanted = [Request(f"r{i}", 0, prompt_ids[i][:40], PLAIN) for i in range(6)]
    expected = replies(heard(singly, wanted))
    full = demo_engine(head="certified", steps_at_once=8, max_running=2)
    events = heard(full, wanted)
    assert replies(events) == expected
    last = {each.request_id for each in events if len(each.token_ids) > 1}
    assert last <= {"r4", "r5"}  # none waits behind these
    full.close()
    # Sequences give up their blocks to others.
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


def test_a_body_that_overflows_in_a_run_ends_the_sequence_with_its_reason(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    engine = demo_engine(head="certified", steps_at_once=8)
    forward = engine.model.body.forward

    def overflowing(batch: Batch) -> torch.Tensor:
        hidden = forward(batch)
        return hidden * torch.nan if int(batch.positions[-1]) >= 41 else hidden

    engine.model.body.forward = overflowing  # type: ignore[method-assign]
    events = heard(engine, [Request("a", 0, prompt_ids[0][:30], PLAIN)])
    assert sum(len(each.token_ids) for each in events) == 12
    assert events[-1].finish_reason == "error"
    assert "NaN" in str(events[-1].error)
    engine.close()
