"""How many threads a step has: the fastest for its number of rows, and never another token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from lexshard.actors.body.batch import Batch, Body
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.threads import choice, measurement
from lexshard.actors.engine.threads.choice import EngineThreads, choose_threads, thread_candidates
from lexshard.actors.engine.threads.measurement import SIZES, ThreadTiming, time_threads
from lexshard.actors.head.calibration import calibrate
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels import pool
from tests.support.manual_clock import ManualClock
from tests.support.paths import DEMO


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    return ManualClock(monkeypatch, measurement)


@pytest.fixture(autouse=True)
def _one_thread_afterwards() -> Iterator[None]:
    yield
    pool.set_threads(1)
    torch.set_num_threads(1)


class SleepingBody:
    """As fast by ``clock`` as ``milliseconds(rows, threads)``; also a head that takes no time."""

    device = torch.device("cpu")
    vocabulary_size, max_positions = 50, 64

    def __init__(self, clock: ManualClock | None, milliseconds: Any) -> None:
        self._clock, self._milliseconds = clock, milliseconds
        self.forwards: list[tuple[int, int]] = []
        self.blocks = 0

    def allocate_cache(self, num_blocks: int) -> None:
        self.blocks = num_blocks

    def forward(self, batch: Batch) -> torch.Tensor:
        rows, threads = len(batch.token_ids), pool.threads()
        assert torch.get_num_threads() == threads
        assert len(set(batch.slots.tolist())) == rows
        assert batch.slots.max() < 16 * self.blocks
        assert 0 <= batch.positions.min() <= batch.positions.max() < self.max_positions
        assert np.array_equal(batch.row_sequence[batch.output_rows], np.unique(batch.row_sequence))
        self.forwards.append((rows, threads))
        assert self._clock is not None
        self._clock.sleep(self._milliseconds(rows, threads) / 1000)
        return torch.zeros(len(batch.output_rows), 4)

    def screen(self, hidden: torch.Tensor, rows: RowTable) -> None:
        assert len(hidden) == len(rows) > 0

    def rescore(self, thresholds: None) -> None:
        pass


def timed(body: SleepingBody, candidates: Sequence[int]) -> list[ThreadTiming]:
    return time_threads(cast(Body, body), cast(OutputHead, body), candidates)


# -- which numbers, and which of them -------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "samplers", "candidates"),
    [
        (1, False, (1,)),
        (2, False, (1, 2)),
        (2, True, (1,)),
        (3, False, (1, 2)),
        (4, False, (1, 2, 3)),
        (4, True, (1, 2)),
        (9, False, (1, 2, 4, 8)),
        (16, False, (1, 2, 4, 8, 15)),
        (16, True, (1, 2, 4, 8, 14)),
    ],
)
def test_every_core_may_be_used_but_those_of_others(
    cores: int, samplers: bool, candidates: tuple[int, ...]
) -> None:
    assert thread_candidates(cores, samplers=samplers) == candidates


def timings_of(*milliseconds: tuple[int, dict[int, float]]) -> list[ThreadTiming]:
    return [
        ThreadTiming(rows, threads, taken)
        for rows, row in milliseconds
        for threads, taken in row.items()
    ]


def test_fewer_threads_are_kept_where_more_are_not_clearly_faster() -> None:
    assert choose_threads(timings_of((1, {1: 1.0, 2: 0.98, 4: 1.3}))) == ((1, 1),)
    assert choose_threads(timings_of((1, {1: 1.0, 2: 0.98, 4: 0.96}))) == ((1, 4),)
    assert choose_threads(timings_of((1, {4: 0.5, 2: 0.51, 1: 1.0}))) == ((1, 2),)


def test_each_number_of_rows_has_its_own() -> None:
    timings = timings_of(
        (1, {1: 1.0, 2: 1.5}), (4, {1: 3.0, 2: 2.0}), (16, {2: 7.0}), (64, {1: 9.0, 2: 9.0})
    )
    assert choose_threads(timings) == ((1, 1), (4, 2), (64, 1))


# -- measuring ------------------------------------------------------------------------------------


def test_what_is_fastest_is_found(clock: ManualClock) -> None:
    """Handing out takes 3 ms a thread; a row takes 1 ms, shared among threads."""
    body = SleepingBody(clock, lambda rows, threads: 3 * (threads - 1) + rows / threads)
    timings = timed(body, (1, 2, 4))
    assert choose_threads(timings) == ((1, 1), (16, 2), (64, 4))
    assert [each.rows for each in timings if each.threads == 4] == list(SIZES)
    last = next(each for each in timings if (each.rows, each.threads) == (64, 4))
    assert last.milliseconds == pytest.approx(3 * 3 + 64 / 4)


def test_what_is_hopeless_is_soon_left_alone(clock: ManualClock) -> None:
    """One thread is no longer tried with more rows; three are not, either, where each try takes
    long. So slow models are timed a few times only."""
    body = SleepingBody(clock, lambda rows, threads: 300 if threads == 1 else 100)
    timings = timed(body, (1, 2))
    assert [(each.rows, each.threads) for each in timings] == [(1, 1), *((r, 2) for r in SIZES)]
    assert body.forwards.count((1, 1)) == 1
    assert clock.perf_counter() < 10


def test_one_slow_turn_decides_nothing(clock: ManualClock) -> None:
    turns = iter(range(10_000))
    body = SleepingBody(
        clock, lambda rows, threads: (2 if threads == 2 else 3) + 30 * (not next(turns) % 7)
    )
    assert choose_threads(timed(body, (1, 2))) == ((1, 2),)


def test_threads_that_are_given_are_not_measured(clock: ManualClock) -> None:
    body = SleepingBody(clock, lambda rows, threads: 1)
    given = EngineThreads(EngineConfiguration("", threads=3), cores=2)
    given.choose(cast(Body, body), cast(OutputHead, body))
    assert (given.choices, given.most, given.timings) == (((1, 3),), 3, ())
    alone = EngineThreads(EngineConfiguration(""), cores=1)
    alone.choose(cast(Body, body), cast(OutputHead, body))
    assert (alone.choices, alone.timings) == (((1, 1),), ())
    assert body.forwards == []


def test_a_step_has_what_was_chosen_for_its_rows(clock: ManualClock) -> None:
    body = SleepingBody(clock, lambda rows, threads: 3 * (threads - 1) + rows / threads)
    threads = EngineThreads(EngineConfiguration(""), cores=5)
    assert pool.threads() == torch.get_num_threads() == 4
    threads.choose(cast(Body, body), cast(OutputHead, body))
    assert threads.choices == ((1, 1), (16, 2), (64, 4))
    assert threads.most == 4
    for rows, expected in ((1, 1), (15, 1), (16, 2), (63, 2), (64, 4), (512, 4), (1, 1)):
        choice.begin_step(rows)
        assert pool.threads() == torch.get_num_threads() == expected


def test_tiers_are_timed_with_the_threads_that_were_chosen() -> None:
    used: dict[int, set[int]] = {}

    class RecordingHead(SleepingBody):
        def start_with(self, choices: object) -> None:
            pass

        def screen(self, hidden: Any, rows: RowTable) -> None:
            used.setdefault(len(rows), set()).add(pool.threads())

        def rescore(self, thresholds: None) -> Any:
            class Found:
                offsets = np.zeros(1)

            return Found()

    pool.set_threads_by_rows(((1, 1), (4, 2), (16, 3)))
    head: Any = RecordingHead(None, None)
    calibrate(head, ["int4", "int8"], np.zeros((64, 4), np.float32), 64)
    assert used == {1: {1}, 2: {1}, 4: {2}, 8: {2}, 16: {3}, 32: {3}, 64: {3}}


# -- in the engine --------------------------------------------------------------------------------


def requests(count: int) -> list[Request]:
    parameters = [
        SamplingParameters(temperature=0.8, seed=seed, max_tokens=20, top_k=40 * (seed % 2))
        for seed in range(count)
    ]
    return [
        Request(str(seed), 0, tuple(range(5, 30 + seed)), each)
        for seed, each in enumerate(parameters)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("body", ["fused", pytest.param("general", marks=pytest.mark.slow)])
def test_an_engine_measures_and_says_what_it_uses(body: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(choice, "available_cores", lambda: 2)
    monkeypatch.setattr(measurement, "SECONDS", 0.02)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "body": body}
    one = Engine(EngineConfiguration(str(DEMO), threads=1, **settings))
    assert (one.information.thread_choices, one.information.thread_timings) == (((1, 1),), ())
    expected = [each.token_ids for each in run_to_completion(one, requests(9))]
    engine = Engine(EngineConfiguration(str(DEMO), **settings))
    told = engine.information
    assert {rows for rows, _, _ in told.thread_timings} == set(SIZES)
    assert {threads for _, threads, _ in told.thread_timings} == {1, 2}
    assert all(milliseconds > 0 for _, _, milliseconds in told.thread_timings)
    assert told.threads == max(threads for _, threads in told.thread_choices)
    assert [each.token_ids for each in run_to_completion(engine, requests(9))] == expected
    # Whatever is chosen, also when it changes from step to step.
    for choices in (((1, 2),), ((1, 1), (2, 3), (5, 2)), ((1, 3), (9, 1))):
        pool.set_threads_by_rows(choices)
        assert [each.token_ids for each in run_to_completion(engine, requests(9))] == expected
