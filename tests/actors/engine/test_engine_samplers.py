"""Samplers beside the engine: the same tokens, whoever dies, leaves or is preempted."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch

from lexshard.actors.configuration import EngineConfiguration, SamplerPlacement
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.messages import Commands, Request, SamplingParameters
from lexshard.cluster.samplers.start import start_sampler
from tests.support.paths import DEMO

PromptIds = list[tuple[int, ...]]

# Every way of deciding: certified candidates and dense rows, with and without a history.
KINDS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.9),
    SamplingParameters(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01),
    SamplingParameters(temperature=0.7, top_p=0.9),
    SamplingParameters(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    ),
    SamplingParameters(temperature=1.0, top_p=0.8, repetition_penalty=0.9, min_tokens=5),
    SamplingParameters(temperature=0.7, logprobs=3),
    SamplingParameters(temperature=0.9, logit_bias=((5, 3.0), (9, -100.0)), bad_words=((11,),)),
    SamplingParameters(temperature=1.0, allowed_ids=tuple(range(40, 90))),
)


def requests_of(prompt_ids: PromptIds, count: int) -> list[Request]:
    return [
        Request(
            str(index),
            0,
            prompt_ids[index % len(prompt_ids)],
            replace(KINDS[index % len(KINDS)], seed=index, max_tokens=24, ignore_eos=True),
        )
        for index in range(count)
    ]


def make_engine(**settings: object) -> Engine:
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, **settings}
    return Engine(EngineConfiguration(str(DEMO), **settings), start_sampler)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(prompt_ids: PromptIds) -> list[tuple[tuple[int, ...], Any]]:
    """What the engine decides by itself."""
    done = run_to_completion(make_engine(), requests_of(prompt_ids, 27))
    return [(each.token_ids, each.logprobs) for each in done]


@pytest.mark.parametrize(
    ("count", "threads", "blocks"),
    [
        (3, 1, 1100),  # too little memory for all at once: sequences are preempted
        (1, 2, None),
        (2, 1, None),
    ],
)
def test_samplers_change_no_token(
    expected: list[Any],
    prompt_ids: PromptIds,
    count: int,
    threads: int,
    blocks: int | None,
) -> None:
    settings: dict[str, object] = {}
    if blocks is not None:
        settings = {"kv_cache_bytes": blocks * 1024, "max_model_len": 256}
    engine = make_engine(samplers=count, sampler_threads=threads, **settings)
    try:
        done = run_to_completion(engine, requests_of(prompt_ids, 27))
        assert [(each.token_ids, each.logprobs) for each in done] == expected
        engine.check_idle()
        statistics = engine.statistics()
        assert statistics.sampler_busy_seconds > 0
        assert statistics.samplers_lost == 0
        if blocks is not None:
            assert statistics.preemptions > 0
    finally:
        engine.close()


def test_a_killed_sampler_loses_no_request_and_changes_no_token(
    expected: list[Any], prompt_ids: PromptIds
) -> None:
    """Samplers are killed with a step in their hands, again and again."""
    handles: list[Any] = []

    def start(
        settings: SamplerSettings, placement: SamplerPlacement, closing: Event
    ) -> SamplerHandle:
        handles.append(start_sampler(settings, placement, closing))
        return handles[-1]

    configuration = EngineConfiguration(
        str(DEMO), dtype="float32", device="cpu", threads=1, samplers=2
    )
    engine = Engine(configuration, start)
    waiting = requests_of(prompt_ids, 27)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    unfinished = set(tokens)
    for request in waiting:
        engine.submit(request)
    flight, steps, killed = None, 0, 0
    while unfinished:
        plan = engine.steps.plan()
        hidden = None if plan is None else engine.steps.forward(plan)
        for event in () if flight is None else engine.steps.commit(flight):
            assert event.error is None
            tokens[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                unfinished.discard(event.request_id)
        flight = None
        if plan is not None and hidden is not None:
            flight = engine.steps.decide(plan, hidden)
            steps += 1
            if steps in (5, 20):
                victim = handles[0] if steps == 5 else handles[1]
                os.kill(victim.process_id, signal.SIGKILL)
                killed += 1
    assert [tuple(tokens[str(index)]) for index in range(27)] == [each[0] for each in expected]
    assert killed == 2
    assert engine.statistics().samplers_lost == 2
    engine.check_idle()
    engine.close()
    assert all(handle.process_id not in _children() for handle in handles)


def _children() -> set[int]:
    """Process ids of this process's children that have not ended."""
    path = f"/proc/self/task/{os.getpid()}/children"
    with open(path) as file:
        return {int(each) for each in file.read().split()}


def test_a_request_cancelled_while_its_token_is_decided_leaves_nothing(
    prompt_ids: PromptIds,
) -> None:
    engine = make_engine(samplers=1)
    for request in requests_of(prompt_ids, 4):
        engine.submit(request)
    plan = engine.steps.plan()
    assert plan is not None
    flight = engine.steps.decide(plan, engine.steps.forward(plan))
    for name in ("0", "1", "2", "3"):
        engine.cancel(name)
    assert engine.steps.commit(flight) == []
    assert engine.steps.plan() is None
    engine.check_idle()
    assert engine.statistics().cancelled == 4
    engine.close()


# -- what comes and goes while decisions are on their way ------------------------------------------


def _drive(engine: Engine, way: str, requests: Sequence[Request], cancel: set[str]) -> dict:
    """Runs requests to their ends; those in ``cancel`` are cancelled with a forward in flight."""
    ends: dict[str, Any] = {}
    events: list[Any] = []
    waiting = list(requests)
    if way == "loop":
        commands: list[Commands | None] = [Commands(submit=tuple(waiting))]

        class Source:
            def receive(self, wait_seconds: float) -> Commands | None:
                if commands:
                    return commands.pop(0)
                if len(ends) + len(cancel) == len(requests):
                    return Commands(stop=True)
                return None

        def emit(output: Any) -> None:
            for event in output.events:
                assert event.request_id not in ends, "ended twice"
                if event.finish_reason is not None:
                    ends[event.request_id] = event

        commands.extend([None, Commands(cancel=tuple(cancel)), None])
        run_engine(engine, Source(), emit, report_seconds=0.01)
        return ends
    for request in waiting:
        events.extend(filter(None, [engine.submit(request)]))
    for step in range(2000):
        if step == 1:
            for name in cancel:
                engine.cancel(name)
        events.extend(engine.step())
        for event in events:
            assert event.request_id not in ends, "ended twice"
            if event.finish_reason is not None:
                ends[event.request_id] = event
        events = []
        if len(ends) + len(cancel) == len(requests):
            break
    return ends


@pytest.fixture(scope="module")
def overlapping() -> Any:
    engine = make_engine(samplers=1, step_tokens=64)
    yield engine
    engine.check_idle()
    engine.close()


@pytest.mark.parametrize("way", ["step", "loop"])
def test_leaving_while_a_long_prompt_is_computed_harms_nobody(
    overlapping: Engine, prompt_ids: PromptIds, way: str
) -> None:
    long = tuple(prompt_ids[0] * 40)[:400]  # many steps of 64 tokens
    parameters = SamplingParameters(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [Request("long", 0, long, parameters)]
    requests += [Request(str(index), 0, prompt_ids[index], parameters) for index in range(3)]
    ends = _drive(overlapping, way, requests, {"long"})
    assert {name: event.finish_reason for name, event in ends.items()} == {
        "0": "length",
        "1": "length",
        "2": "length",
    }


@pytest.mark.parametrize("way", ["step", "loop"])
def test_no_tokens_wanted_ends_once(overlapping: Engine, prompt_ids: PromptIds, way: str) -> None:
    requests = [
        Request(str(index), 0, prompt_ids[index], SamplingParameters(max_tokens=index % 2 * 4))
        for index in range(6)
    ]
    assert len(_drive(overlapping, way, requests, set())) == 6


@pytest.mark.parametrize("way", ["step", "loop"])
def test_a_hidden_state_that_is_not_finite_harms_only_its_own(
    overlapping: Engine, prompt_ids: PromptIds, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = overlapping.steps
    forward = steps.forward

    def damaged(plan: Any) -> torch.Tensor:
        hidden = forward(plan).clone()
        row = 0
        for chunk in plan.chunks:
            if chunk.draws:
                if chunk.sequence.request.request_id == "1" and chunk.sequence.output_length == 2:
                    hidden[row] = float("nan")
                row += 1
        return hidden

    monkeypatch.setattr(steps, "forward", damaged)
    parameters = SamplingParameters(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [Request(str(index), 0, prompt_ids[index], parameters) for index in range(4)]
    ends = _drive(overlapping, way, requests, set())
    assert {name: event.finish_reason for name, event in sorted(ends.items())} == {
        "0": "length",
        "1": "error",
        "2": "length",
        "3": "length",
    }


def test_prompt_logprobs_survive_preemption(prompt_ids: PromptIds) -> None:
    engine = make_engine(
        samplers=1,
        max_model_len=128,
        kv_cache_bytes=24 * 16 * 4 * 2 * 4 * 256 // 2,
    )
    parameters = SamplingParameters(
        temperature=0.7, max_tokens=40, prompt_logprobs=2, ignore_eos=True
    )
    prompts = [tuple(each * 50)[: 30 + index] for index, each in enumerate(prompt_ids[:12])]
    done = engine.generate(prompts, parameters)
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.prompt_logprobs is not None
        assert len(completion.prompt_logprobs) == len(prompt)
    assert engine.statistics().preemptions > 0
    engine.check_idle()
    engine.close()
