"""Samplers beside the engine: the same tokens, hidden behind the forward pass, and mortal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DEMO

from actors.completion import run_to_completion
from actors.configuration import EngineConfiguration, SamplerPlacement
from actors.decision_messages import DecisionResult, DecisionWork, SamplerSettings
from actors.decision_plane import DecisionPlane, PlaneCounters, SamplerHandle
from actors.engine import Engine
from actors.engine_loop import Commands, run_engine
from actors.kv_cache import BlockPool
from actors.local_samplers import InlineSampler, ThreadSampler
from actors.messages import Candidates, Certificate, Need, Request, SamplingParameters
from actors.sampler import Sampler
from actors.scheduler import Scheduler
from actors.sequence import Sequence as EngineSequence
from actors.sequence_state import SequenceStates
from actors.steps import Steps
from cluster.samplers import start_sampler

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
    ("count", "threads", "placement", "blocks"),
    [
        (1, 1, "threads", None),
        (2, 1, "threads", None),
        (3, 1, "threads", 1100),  # too little memory for all at once: sequences are preempted
        (1, 2, "processes", None),
        (2, 1, "processes", 1100),
    ],
)
def test_samplers_change_no_token(
    expected: list[Any],
    prompt_ids: PromptIds,
    count: int,
    threads: int,
    placement: SamplerPlacement,
    blocks: int | None,
) -> None:
    settings: dict[str, object] = {}
    if blocks is not None:
        settings = {"kv_cache_bytes": blocks * 1024, "max_model_len": 256}
    engine = make_engine(
        samplers=count, sampler_threads=threads, sampler_placement=placement, **settings
    )
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

    def start(settings: SamplerSettings, placement: SamplerPlacement) -> SamplerHandle:
        handles.append(start_sampler(settings, placement))
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
        plan = engine.plan()
        hidden = None if plan is None else engine.forward(plan)
        for event in () if flight is None else engine.commit(flight):
            assert event.error is None
            tokens[event.request_id].extend(event.token_ids)
            if event.finish_reason is not None:
                unfinished.discard(event.request_id)
        flight = None
        if plan is not None and hidden is not None:
            flight = engine.decide(plan, hidden)
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
    engine = make_engine(samplers=1, sampler_placement="threads")
    for request in requests_of(prompt_ids, 4):
        engine.submit(request)
    plan = engine.plan()
    assert plan is not None
    flight = engine.decide(plan, engine.forward(plan))
    for name in ("0", "1", "2", "3"):
        engine.cancel(name)
    assert engine.commit(flight) == []
    assert engine.plan() is None
    engine.check_idle()
    assert engine.statistics().cancelled == 4
    engine.close()


# -- hidden behind a forward pass of known length --------------------------------------------------

SIZE = 151_936
WARM_UP, MEASURED = 6, 18


class _Head:
    """Logits that are at hand: what a device has left in memory when its forward pass ends."""

    def __init__(self, rows: int, size: int) -> None:
        generator = np.random.default_rng(0)
        self._raw = (3 * generator.standard_normal((rows, size))).astype(np.float32)
        self._ids = np.tile(np.arange(size, dtype=np.int32), rows)
        self._size = size
        self.vocabulary_size = size

    def screen(self, hidden: torch.Tensor, needs: Sequence[Need]) -> int:
        return len(needs)

    def rescore(self, rows: int) -> Candidates:
        certificate = Certificate("dense", "dense", "dense", self._size, 0)
        raw = self._raw[:rows].reshape(-1)
        offsets = np.arange(rows + 1) * self._size
        return Candidates(self._ids[: len(raw)], raw, raw, offsets, (certificate,) * rows)


class _Body:
    """A forward pass that takes a known time on another machine."""

    device = torch.device("cpu")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def forward(self, batch: Any) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.zeros(len(batch.output_rows), 1)


class _Slow:
    """A sampler that takes ``seconds`` longer."""

    def __init__(self, settings: SamplerSettings, seconds: float) -> None:
        self._own = Sampler(settings)
        self._seconds = seconds

    def decide(self, work: DecisionWork) -> DecisionResult:
        time.sleep(self._seconds)
        result = self._own.decide(work)
        return replace(result, busy_seconds=result.busy_seconds + self._seconds)


def _steps(
    forward: float, handle: SamplerHandle, size: int, sequences: int, parameters: SamplingParameters
) -> tuple[float, Steps, DecisionPlane]:
    """Median seconds of a step of half of the sequences, all of them decoding."""
    states = SequenceStates(size, (), sequences)
    plane = DecisionPlane(lambda: handle, 1, lambda: handle, size)
    pool = BlockPool(sequences * 8, prefix_cache=False)
    scheduler = Scheduler(pool, step_tokens=512, max_running=sequences, cohorts=2)
    model: Any = SimpleNamespace(body=_Body(forward), eos_token_ids=(), vocabulary_size=size)
    head: Any = SimpleNamespace(head=_Head(sequences, size), device=torch.device("cpu"))
    steps = Steps(model, head, plane, states, scheduler, overlaps=True)
    for name in range(sequences):
        own = replace(parameters, seed=name, max_tokens=60, ignore_eos=True)
        request = Request(str(name), 0, (1, 2, 3), own)
        state = states.open(name, request)
        plane.open(name, request, state.history)
        scheduler.add(EngineSequence(request, name, state, state.history))
    seconds = []
    for step in range(WARM_UP + MEASURED):
        if step == WARM_UP:
            plane.counters = PlaneCounters()
        started = time.perf_counter()
        steps.step()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[WARM_UP:])), steps, plane


FORWARD = 0.04


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_deciding_is_hidden_while_it_is_shorter_than_the_forward_pass(share: float) -> None:
    """A step takes what its forward pass takes, within 3%."""
    settings = SamplerSettings(1000, ())
    slow: Any = _Slow(settings, share * FORWARD)
    handle = ThreadSampler(slow)
    seconds, _, plane = _steps(FORWARD, handle, 1000, 8, SamplingParameters(top_k=50))
    assert FORWARD <= seconds < 1.03 * FORWARD
    assert plane.counters.hidden > 0.9 * plane.counters.busy
    plane.shut_down()


def test_deciding_longer_than_the_forward_pass_shows() -> None:
    slow: Any = _Slow(SamplerSettings(1000, ()), 1.5 * FORWARD)
    handle = ThreadSampler(slow)
    seconds, _, plane = _steps(FORWARD, handle, 1000, 8, SamplingParameters(top_k=50))
    assert seconds > 1.4 * FORWARD
    assert plane.counters.wait > 0
    plane.shut_down()


def test_inline_decisions_are_not_called_hidden() -> None:
    handle = InlineSampler(Sampler(SamplerSettings(1000, ())))
    _, _, plane = _steps(0.001, handle, 1000, 4, SamplingParameters(top_k=50))
    assert plane.counters.hidden == 0
    assert plane.counters.wait >= plane.counters.busy


def test_a_process_with_every_control_on_every_logit_is_hidden() -> None:
    """Real rows of 151,936 logits through shared memory, all controls on."""
    from cluster.sampler_process import SamplerProcess

    handle = SamplerProcess(SamplerSettings(SIZE, (), capacity=8))
    parameters = SamplingParameters(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
    )
    forward = 0.2
    seconds, _, plane = _steps(forward, handle, SIZE, 8, parameters)
    busy = plane.counters.busy / MEASURED
    assert busy < forward
    assert seconds < 1.03 * forward
    assert plane.counters.wait / MEASURED < 0.01 * forward
    plane.shut_down()


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
    engine = make_engine(samplers=1, sampler_placement="threads", step_tokens=64)
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
    steps = overlapping._steps
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
        sampler_placement="threads",
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
