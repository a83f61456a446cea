"""Steps that begin from what a device has drawn: the same tokens, however often it is wrong.

A head on the CPU stands in for one on a device: it says what it has drawn as soon as it is asked,
and that is what the engine decided in another run, or something else.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.engine.completion import Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.engine.several_steps import ahead
from lexshard.actors.head.output_head import Hidden, OutputHead, Screening, Thresholds
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.messages import Commands, Request, SamplingParameters, StepOutput
from lexshard.actors.states.noise_key import noise_key
from lexshard.actors.states.row_table import RowTable
from tests.support.demo_engine import demo_engine
from tests.support.paths import ROOT
from tests.support.speculation_cases import requests_of
from tests.support.stepped_engines import Source
from tests.support.tiny_models import save_tiny

PromptIds = list[tuple[int, ...]]
Told = dict[tuple[int, int], int]  # tokens by key and position
# What a device draws for.
KINDS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.9),
    SamplingParameters(temperature=1.2, top_k=40, top_p=0.9),
    SamplingParameters(temperature=0.8, min_p=0.05),
    SamplingParameters(temperature=0.8, top_k=20, logit_bias=((9, 2.0),)),
    SamplingParameters(temperature=0.0, allowed_ids=tuple(range(300, 9000)), certificate=True),
    SamplingParameters(temperature=0.0, repetition_penalty=1.2),
    SamplingParameters(
        temperature=0.9,
        top_k=30,
        frequency_penalty=0.7,
        presence_penalty=0.5,
        logit_bias=((9, 2.0),),
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class _Found(Screening):
    candidates: Candidates | NonFiniteHiddenError


class _Device:
    """``head``, which draws what it was ``told``, but for a share of tokens that are ``wrong``."""

    def __init__(self, head: OutputHead, told: Told, wrong: float) -> None:
        self.vocabulary_size = head.vocabulary_size
        self._head, self._told, self._wrong = head, told, wrong
        self._random = np.random.default_rng(5)

    def screen(
        self, hidden: Hidden, rows: RowTable, before: torch.Tensor | None = None
    ) -> Thresholds:
        """At once, as of the device's own copy of what the rows ask, with one token more."""
        if before is not None:
            rows = _with_one_more(rows, before.tolist())
        drawn = None
        if all(kind in ("top1", "topk", "minp") for kind in rows.kinds):
            controls = rows.controls
            names = zip(controls.key.tolist(), controls.position.tolist(), strict=True)
            drawn = torch.tensor(list(map(self._draw, names)), dtype=torch.int32)
        found: Candidates | NonFiniteHiddenError
        try:
            found = self._head.rescore(self._head.screen(hidden, rows))
        except NonFiniteHiddenError as error:
            found = error
        return Thresholds(np.zeros(len(rows)), rows, _Found(found), drawn=drawn)

    def rescore(self, thresholds: Thresholds) -> Candidates:
        step = thresholds.screening
        assert isinstance(step, _Found)
        if isinstance(step.candidates, NonFiniteHiddenError):
            raise step.candidates
        drawn = None if thresholds.drawn is None else thresholds.drawn.numpy()
        return replace(step.candidates, drawn=drawn)

    def _draw(self, name: tuple[int, int]) -> int:
        if self._random.random() < self._wrong:
            return int(self._random.choice([-1, 7, 16_000]))
        return self._told.get(name, -1)


def _with_one_more(rows: RowTable, before: Sequence[int]) -> RowTable:
    """The same rows, which have seen these tokens, too."""
    needs = [rows.need(row) for row in range(len(rows))]
    for row, (need, token_id) in enumerate(zip(needs, before, strict=True)):
        adjustment = need.adjustment
        if adjustment is not None and adjustment.tables is not None and token_id >= 0:
            table = adjustment.tables[adjustment.table : adjustment.table + 1].copy()
            table[0, token_id] = max(1, table[0, token_id]) + 1
            needs[row] = replace(
                need, adjustment=replace(adjustment, tables=table, table=0, seen=None)
            )
    return RowTable.of(needs)


def _engine(**settings: Any) -> Engine:
    return demo_engine(body="general", **settings)


def _ahead(told: Told, wrong: float = 0.0, **settings: Any) -> Engine:
    engine = _engine(**settings)
    engine._head.head = _Device(engine._head.head, told, wrong)  # type: ignore[attr-defined]
    engine.steps.draws_ahead = True
    return engine


def _told(requests: Sequence[Request], completions: Sequence[Completion]) -> Told:
    return {
        (noise_key(request.parameters.seed, request.choice), position): token_id
        for request, completion in zip(requests, completions, strict=True)
        for position, token_id in enumerate(completion.token_ids, len(request.prompt_ids))
    }


def _drawable(prompt_ids: PromptIds, count: int) -> list[Request]:
    """Requests that a device draws for alone; some end early, at a stop token."""
    return [
        replace(
            request,
            parameters=replace(
                KINDS[index % len(KINDS)],
                seed=request.parameters.seed,
                max_tokens=request.parameters.max_tokens,
                stop_token_ids=request.parameters.stop_token_ids if index % 3 else (),
            ),
        )
        for index, request in enumerate(requests_of(prompt_ids, count))
    ]


@pytest.fixture(scope="module")
def drawable(prompt_ids: PromptIds) -> tuple[list[Request], list[Completion]]:
    requests = _drawable(prompt_ids, 18)
    return requests, run_to_completion(_engine(), requests)


@pytest.mark.parametrize("wrong", [0.0, 0.1, 1.0])
def test_what_the_device_draws_changes_no_token(
    wrong: float, drawable: tuple[list[Request], list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come while others are in the middle: what has begun gives them their place."""
    monkeypatch.setattr(ahead, "TOLERATED", 2.0)
    monkeypatch.setattr(ahead, "LEFT_OPEN", 1.0)
    requests, expected = drawable
    engine = _ahead(_told(requests, expected), wrong, max_model_len=128)
    computed: list[bool] = []
    forward = engine.steps.forward

    def count(plan: Any, drawn: torch.Tensor | None = None) -> torch.Tensor:
        computed.append(drawn is not None)
        return forward(plan, drawn)

    monkeypatch.setattr(engine.steps, "forward", count)
    collected: dict[str, list[int]] = {each.request_id: [] for each in requests}
    unfinished, waiting = set(collected), list(requests)
    while unfinished:
        if waiting:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            collected[event.request_id].extend(event.token_ids)
            if event.finish_reason:
                unfinished.remove(event.request_id)
    engine.check_idle()
    assert [tuple(tokens) for tokens in collected.values()] == [each.token_ids for each in expected]
    tally = engine.steps.device_draws
    assert tally.decided > 100
    assert (tally.wrong > 0) == (wrong > 0)
    if not wrong:  # nearly all that need no prompt, once all have come
        assert sum(computed) > len(computed) / 2
    assert engine.statistics().generated_tokens == sum(map(len, collected.values()))
    engine.close()


def test_a_device_that_leaves_many_rows_is_asked_again_later() -> None:
    """Tight bounds may come back with other requests; that it draws wrong ones is no passing
    state."""
    draws = ahead.DeviceDraws()
    said = Mock(token_ids=[1, 7])
    chunks = [Mock(sequence=said, start=0) for _ in range(ahead.FEWEST_TESTED)]
    few: Any = {chunk: 7 if place > 10 else -1 for place, chunk in enumerate(chunks)}
    draws.count(few)
    assert (draws.begins(), draws.decided, draws.wrong) == (True, ahead.FEWEST_TESTED - 11, 0)
    many: Any = {chunk: 7 if place > 20 else -1 for place, chunk in enumerate(chunks)}
    draws.count(many)
    begun = [draws.begins() for _ in range(ahead.RESTED_STEPS)]
    assert begun == [False] * (ahead.RESTED_STEPS - 1) + [True]
    assert draws.wrong == 0


def test_rows_that_only_the_host_draws_are_decided_in_turn(prompt_ids: PromptIds) -> None:
    """Bans, log-probabilities and top-p alone among them, also where sequences lose their blocks to
    others."""
    requests = requests_of(prompt_ids, 20)
    expected = run_to_completion(_engine(), requests)
    engine = _ahead(_told(requests, expected), 0.02, kv_cache_bytes=17 * 65_536, max_model_len=256)
    assert run_to_completion(engine, requests) == expected
    engine.check_idle()
    assert engine.statistics().preemptions
    engine.close()


def test_a_device_that_is_wrong_too_often_is_heard_no_longer(
    drawable: tuple[list[Request], list[Completion]], caplog: pytest.LogCaptureFixture
) -> None:
    requests, expected = drawable
    engine = _ahead(_told(requests, expected), 0.5)
    with caplog.at_level(logging.WARNING, "lexshard"):
        assert run_to_completion(engine, requests) == expected
    assert (
        ahead.FEWEST_TESTED
        <= engine.steps.device_draws.decided
        <= ahead.FEWEST_TESTED + len(requests)
    )
    assert [record for record in caplog.records if "no step begins" in record.getMessage()]
    engine.close()


def test_what_is_cancelled_while_its_next_step_computes_is_forgotten(
    drawable: tuple[list[Request], list[Completion]],
) -> None:
    """Every request is cancelled after another number of tokens, and others go on."""
    requests, expected = drawable
    engine = _ahead(_told(requests, expected), 0.05, max_model_len=128)
    kept = {each.request_id for each in requests[::3]}
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    ended: set[str] = set()
    cancel: list[str] = []

    def commands() -> Iterator[Commands | None]:
        yield Commands(submit=tuple(requests))
        while ended != set(tokens):
            gone = tuple(cancel)
            cancel.clear()
            ended.update(gone)
            yield Commands(cancel=gone) if gone else None

    def emit(output: StepOutput) -> None:
        for event in output.events:
            tokens[event.request_id].extend(event.token_ids)
            if event.finish_reason:
                ended.add(event.request_id)
            elif event.request_id not in kept and len(tokens[event.request_id]) > 2:
                cancel.append(event.request_id)

    run_engine(engine, Source(commands()), emit, report_seconds=0.01)
    engine.check_idle()
    for completion in expected:
        found = tokens[completion.request_id]
        assert tuple(found) == completion.token_ids[: len(found)]
        if completion.request_id in kept:
            assert len(found) == len(completion.token_ids)
    engine.close()


def test_a_row_that_is_not_finite_ends_its_sequence_alone(
    drawable: tuple[list[Request], list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, expected = drawable
    requests, expected = requests[:6], expected[:6]
    longest = max(range(6), key=lambda each: len(expected[each].token_ids))
    broken_at = len(requests[longest].prompt_ids) + 3
    engine = _ahead(_told(requests, expected))
    forward = engine.steps.forward

    def damaged(plan: Any, drawn: torch.Tensor | None = None) -> torch.Tensor:
        hidden = forward(plan, drawn).clone()
        for row, chunk in enumerate(plan.chunks):
            own = chunk.sequence.request.request_id == requests[longest].request_id
            if own and drawn is not None and chunk.start == broken_at:
                hidden[row, 3] = float("nan")
        return hidden

    monkeypatch.setattr(engine.steps, "forward", damaged)
    found = run_to_completion(engine, requests)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if index == longest:
            assert ours.error is not None
            assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
        else:
            assert ours == theirs
    engine.check_idle()
    engine.close()


INTERPRETED = """
import sys
import torch
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.head.gpu.device_shard import DeviceShard
from lexshard.kernels.quantize import quantize
from tests.actors.engine.test_steps_ahead import interpreted_requests
settings = {"dtype": "float32", "device": "cpu", "body": "general", "head": "dense", "threads": 1}
engine = Engine(EngineConfiguration(sys.argv[1], **settings))
expected = run_to_completion(engine, interpreted_requests())
weight = engine.model.head.weight.detach().float()
tier = quantize(weight, "int8")
engine._head.head = DeviceShard(weight, None, None, 1.0, len(weight), tier, device="cpu")
engine.steps.draws_ahead = True
assert run_to_completion(engine, interpreted_requests()) == expected
draws = engine.steps.device_draws
assert draws.decided > 18, draws
assert draws.wrong == 0, draws
"""


def interpreted_requests() -> list[Request]:
    """One of each kind that a device draws for, of a model of 97 tokens."""
    return [
        Request(
            str(row), 0, (7 * row, 5, 9), replace(kind, max_tokens=5, seed=row, ignore_eos=True)
        )
        for row, kind in enumerate((*KINDS[:5], *KINDS[6:]), 1)
    ]


@pytest.mark.slow
def test_a_device_draws_the_tokens_that_the_host_decides(tmp_path: Path) -> None:
    """The head of a GPU in Triton's interpreter: nothing that it drew is computed again."""
    pytest.importorskip("triton")
    save_tiny("qwen3", tmp_path)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", INTERPRETED, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)


@pytest.mark.slow
def test_a_step_is_two_graphs_and_waits_for_nothing(tmp_path: Path) -> None:
    """To be launched, from what the device drew: the body's and the head's. Without a GPU, on one
    that computes nothing, and cannot be read."""
    pytest.importorskip("triton")
    save_tiny("qwen3", tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.step_launches", str(tmp_path)]
    told = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    searched, adjusted = (line.split("; ")[1:] for line in told.splitlines())
    for asked in (searched, adjusted):
        assert sum(each.startswith("a graph of ") for each in asked) == 2
    # One copy of the step's integers, one of what its rows ask, one of what the search has found.
    assert len(searched) <= 13
    assert searched.count("copy_") == 7


WAITS = """
import torch
from tests.support.step_launches import GPU, Gpu, on
gpu = Gpu()
with on(gpu):
    there, here = torch.zeros(3, device=GPU), torch.zeros(3)
    waits = {
        "list": lambda: there.tolist(),
        "item": lambda: there[0].item(),
        "truth": lambda: bool(there.any()),
        "nonzero": lambda: there.nonzero(),
        "host": lambda: there.cpu(),
        "array": lambda: there.numpy(),
        "copy": lambda: there.copy_(here.clone().pin_memory()),
        "from memory that is not pinned": lambda: there.copy_(here, non_blocking=True),
        "to memory that is not pinned": lambda: here.copy_(there, non_blocking=True),
        "moved": lambda: here.to(GPU, non_blocking=True),
        "index": lambda: there[[0, 2]],
        "event": lambda: torch.cuda.Event().synchronize(),
    }
    gpu.watched = True
    there.copy_(here.clone().pin_memory(), non_blocking=True)
    for name, wait in waits.items():
        try:
            wait()
        except RuntimeError:
            continue
        raise SystemExit(name)
"""


@pytest.mark.slow
def test_what_waits_would_be_found() -> None:
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", WAITS], cwd=ROOT, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
