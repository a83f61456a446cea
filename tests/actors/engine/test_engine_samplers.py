"""Samplers beside the engine: the same tokens, whatever dies, leaves or is preempted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest
import torch

from lexshard.actors.configuration import EngineConfiguration, SamplerPlacement
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.plane import SamplerHandle
from lexshard.actors.engine.completion import Completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.messages import Commands, Request, SamplingParameters, StepOutput
from lexshard.cluster.samplers.start import start_sampler
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO
from tests.support.quick import slow
from tests.support.speculation_cases import requests_of, run_and_close
from tests.support.stepped_engines import Source

PromptIds = list[tuple[int, ...]]
GREEDY = SamplingParameters(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(prompt_ids: PromptIds) -> list[Completion]:
    """What the engine decides by itself: certified candidates and dense rows, with and without a
    history, scored prompts."""
    return run_and_close(demo_engine(), requests_of(prompt_ids, 27))


@pytest.mark.parametrize(
    ("count", "threads", "blocks"),
    [
        (1, 2, None),
        slow(2, 1, None),
        slow(3, 1, 17),  # too little memory for all at once: sequences are preempted
    ],
)
def test_samplers_change_no_token(
    expected: list[Completion],
    prompt_ids: PromptIds,
    count: int,
    threads: int,
    blocks: int | None,
) -> None:
    room = {} if blocks is None else {"kv_cache_bytes": blocks * 65_536, "max_model_len": 256}
    engine = demo_engine(samplers=count, sampler_threads=threads, **room)
    assert run_and_close(engine, requests_of(prompt_ids, 27)) == expected
    statistics = engine.statistics()
    assert statistics.sampler_busy_seconds > 0
    assert statistics.samplers_lost == 0
    assert (statistics.preemptions > 0) == (blocks is not None)


def test_a_killed_sampler_loses_no_request_and_changes_no_token(
    expected: list[Completion], prompt_ids: PromptIds
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
    flight, steps = None, 0
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
    assert [tuple(tokens[str(index)]) for index in range(27)] == [
        each.token_ids for each in expected
    ]
    assert engine.statistics().samplers_lost == 2
    engine.check_idle()
    engine.close()
    assert all(handle.process_id not in _children() for handle in handles)


def _children() -> set[int]:
    """Process ids of this process's children that have not ended."""
    path = f"/proc/self/task/{os.getpid()}/children"
    with open(path) as file:
        return {int(each) for each in file.read().split()}


@pytest.mark.slow
def test_a_request_cancelled_while_its_token_is_decided_leaves_nothing(
    prompt_ids: PromptIds,
) -> None:
    engine = demo_engine(samplers=1)
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


def ends_of(
    engine: Engine, way: str, requests: Sequence[Request], cancel: Sequence[str] = ()
) -> dict[str, str | None]:
    """How requests end, each once; those of ``cancel`` are cancelled with a forward in flight."""
    ends: dict[str, str | None] = {}

    def emit(output: StepOutput) -> None:
        for event in output.events:
            assert event.request_id not in ends, "ended twice"
            if event.finish_reason is not None:
                ends[event.request_id] = event.finish_reason

    if way == "loop":

        def commands() -> Iterator[Commands | None]:
            yield from (Commands(submit=tuple(requests)), None, Commands(cancel=tuple(cancel)))
            while len(ends) + len(cancel) != len(requests):
                yield None

        run_engine(engine, Source(commands()), emit, report_seconds=0.01)
        return ends
    emit(StepOutput(tuple(filter(None, map(engine.submit, requests)))))
    for step in range(2000):
        for name in cancel if step == 1 else ():
            engine.cancel(name)
        emit(StepOutput(tuple(engine.step())))
        if len(ends) + len(cancel) == len(requests):
            break
    return ends


@pytest.fixture(scope="module")
def overlapping() -> Iterator[Engine]:
    engine = demo_engine(samplers=1, step_tokens=64)
    yield engine
    engine.check_idle()
    engine.close()


@pytest.mark.parametrize("way", ["step", "loop"])
def test_leaving_while_a_long_prompt_is_computed_harms_no_other(
    overlapping: Engine, prompt_ids: PromptIds, way: str
) -> None:
    long = tuple(prompt_ids[0] * 40)[:400]  # many steps of 64 tokens
    requests = [Request("long", 0, long, GREEDY)]
    requests += [Request(str(index), 0, prompt_ids[index], GREEDY) for index in range(3)]
    ends = ends_of(overlapping, way, requests, ["long"])
    assert ends == {"0": "length", "1": "length", "2": "length"}


@pytest.mark.parametrize("way", ["step", "loop"])
def test_no_tokens_wanted_ends_once(overlapping: Engine, prompt_ids: PromptIds, way: str) -> None:
    requests = [
        Request(str(index), 0, prompt_ids[index], SamplingParameters(max_tokens=index % 2 * 4))
        for index in range(6)
    ]
    assert len(ends_of(overlapping, way, requests)) == 6


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
    requests = [Request(str(index), 0, prompt_ids[index], GREEDY) for index in range(4)]
    ends = ends_of(overlapping, way, requests)
    assert ends == {"0": "length", "1": "error", "2": "length", "3": "length"}
