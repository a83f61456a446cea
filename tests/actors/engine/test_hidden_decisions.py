"""Deciding takes no time of its own while it is shorter than the forward pass beside it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.local_samplers import InlineSampler
from lexshard.actors.decision.messages import DecisionResult, DecisionWork, SamplerSettings
from lexshard.actors.decision.plane import DecisionPlane, PlaneCounters, SamplerHandle
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.sequence import Sequence as EngineSequence
from lexshard.actors.engine.steps import Steps
from lexshard.actors.head.build import BuiltHead
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.kv_cache import BlockPool
from lexshard.actors.messages import Certificate, Request, SamplingParameters
from lexshard.actors.states.row_table import RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from tests.support.thread_sampler import ThreadSampler

Floats = npt.NDArray[np.float64]


SIZE = 151_936
WARM_UP, MEASURED = 6, 18
FORWARD = 0.04


class _Head:
    """Logits that are at hand: what a device has left in memory when its forward pass ends."""

    def __init__(self, rows: int, size: int) -> None:
        generator = np.random.default_rng(0)
        self._raw = (3 * generator.standard_normal((rows, size))).astype(np.float32)
        self._ids = np.tile(np.arange(size, dtype=np.int32), rows)
        self._size = size
        self.vocabulary_size = size

    def screen(self, hidden: torch.Tensor, rows: RowTable) -> int:
        return len(rows)

    def rescore(self, rows: int) -> Candidates:
        certificate = Certificate("dense", "dense", "dense", self._size, 0)
        raw = self._raw[:rows].reshape(-1)
        offsets = np.arange(rows + 1) * self._size
        return Candidates(self._ids[: len(raw)], raw, offsets, (certificate,) * rows)


class _Body:
    """A forward pass that takes a known time on another machine."""

    device = torch.device("cpu")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.took: list[float] = []

    def forward(self, batch: Any) -> torch.Tensor:
        started = time.perf_counter()
        time.sleep(self._seconds)
        self.took.append(time.perf_counter() - started)
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
    body: _Body, handle: SamplerHandle, size: int, sequences: int, parameters: SamplingParameters
) -> tuple[Floats, list[PlaneCounters]]:
    """Seconds of each step of half of the sequences, all of them decoding, and what it counted."""
    states = SequenceStates(size, (), sequences)
    plane = DecisionPlane(lambda: handle, 1, lambda: handle, size)
    pool = BlockPool(sequences * 8, prefix_cache=False)
    scheduler = Scheduler(pool, step_tokens=512, max_running=sequences, cohorts=2)
    model: Any = SimpleNamespace(body=body, eos_token_ids=(), vocabulary_size=size)
    fixed: Any = _Head(sequences, size)
    head = BuiltHead(SequenceHead(fixed, states), "fixed logits")
    constraints = Constraints(size, ())
    steps = Steps(model, head, plane, states, scheduler, constraints=constraints, overlaps=True)
    for name in range(sequences):
        own = replace(parameters, seed=name, max_tokens=60, ignore_eos=True)
        request = Request(str(name), 0, (1, 2, 3), own)
        state = states.open(name, request)
        plane.open(name, request, state.history)
        scheduler.add(EngineSequence(request, name, state, state.history))
    seconds, counted = [], []
    for _ in range(WARM_UP + MEASURED):
        plane.counters = PlaneCounters()
        started = time.perf_counter()
        steps.step()
        seconds.append(time.perf_counter() - started)
        counted.append(plane.counters)
    plane.shut_down()
    return np.array(seconds[WARM_UP:]), counted[WARM_UP:]


def _most_hidden(counted: list[PlaneCounters]) -> float:
    """Of the time of a step's decisions; the most is what nothing disturbed. In turn it is none."""
    return max(each.hidden / each.busy for each in counted)


@pytest.mark.timed
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_deciding_is_hidden_while_it_is_shorter_than_the_forward_pass(share: float) -> None:
    """A step takes what its forward pass takes: 1.3 and 1.9 of it, if deciding came after it.

    What is beside that is the engine's own work; the least of it is what nothing disturbed.
    """
    slow: Any = _Slow(SamplerSettings(1000, ()), share * FORWARD)
    handle, body = ThreadSampler(slow), _Body(FORWARD)
    seconds, counted = _steps(body, handle, 1000, 8, SamplingParameters(top_k=50))
    assert (seconds - np.array(body.took[-len(seconds) :])).min() < 0.5 * share * FORWARD
    assert sum(each.hidden for each in counted) > 0.5 * sum(each.busy for each in counted)


def test_inline_decisions_are_not_called_hidden() -> None:
    handle = InlineSampler(Sampler(SamplerSettings(1000, ())))
    _, counted = _steps(_Body(0.001), handle, 1000, 4, SamplingParameters(top_k=50))
    assert _most_hidden(counted) == 0
    assert all(each.wait >= each.busy for each in counted)


@pytest.mark.timed
def test_a_process_with_every_control_on_every_logit_is_hidden() -> None:
    """Real rows of 151,936 logits through shared memory, all controls on."""
    from lexshard.cluster.samplers.process import SamplerProcess

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
    _, counted = _steps(_Body(FORWARD), handle, SIZE, 8, parameters)
    assert 0 < sum(each.busy for each in counted) < MEASURED * FORWARD
    assert _most_hidden(counted) > 0.5
