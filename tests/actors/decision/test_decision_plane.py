"""The decision plane: the number of samplers, where they run and their deaths change no token."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.local_samplers import InlineSampler
from lexshard.actors.decision.messages import DecisionResult, DecisionWork, SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.plane import (
    DecisionPlane,
    PendingDecision,
    SamplerHandle,
    SamplerLostError,
)
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.messages import Certificate, Request, SamplingParameters
from lexshard.actors.role import Place, here
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceState, SequenceStates
from tests.support.sampler_cases import EOS, parameters_of, reference_token
from tests.support.thread_sampler import ThreadSampler


def first_rows(count: int) -> RowNames:
    return RowNames(tuple(range(count)))


settings.register_profile("plane", deadline=None, max_examples=60)
settings.load_profile("plane")

SIZE = 200
SETTINGS = SamplerSettings(SIZE, EOS, capacity=2)


@dataclass
class Row:
    """One row of a step: its tokens, their logits and whether top-p has been applied."""

    ids: np.ndarray
    raw: np.ndarray
    truncated: bool


TWO_TOKENS = Row(np.array([4, 9], np.int32), np.array([1.0, 2.0], np.float32), False)


def random_row(random: np.random.Generator, state: SequenceState) -> Row:
    raw = (3 * random.standard_normal(SIZE)).astype(np.float32)
    if random.random() < 0.2:
        raw = raw.round()
    dense = random.random() < 0.4 or state.parameters.logprobs is not None
    ids = np.arange(SIZE) if dense else np.flatnonzero(random.random(SIZE) < random.random())
    ids = ids if len(ids) else np.array([7])
    return Row(ids.astype(np.int32), raw[ids], not dense and bool(random.random() < 0.2))


def candidates_of(rows: list[Row]) -> Candidates:
    raw = np.concatenate([row.raw for row in rows])
    certificates = tuple(
        Certificate(
            "nucleus" if row.truncated else "topk",
            "deterministic" if row.truncated or len(row.ids) < SIZE else "dense",
            "int8",
            len(row.ids),
            0,
        )
        for row in rows
    )
    return Candidates(
        ids=np.concatenate([row.ids for row in rows]),
        raw=raw,
        offsets=np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64),
        certificates=certificates,
    )


class MortalSampler:
    """Dies with some probability when it is given work or asked for a result."""

    def __init__(self, random: np.random.Generator, share: float) -> None:
        self._own = InlineSampler(Sampler(SETTINGS))
        self._random = random
        self._share = share
        self._dead = False

    def die(self) -> None:
        self._dead = self._dead or self._random.random() < self._share
        if self._dead:
            raise SamplerLostError("gone")

    def submit(self, work: DecisionWork) -> MortalPending:
        self.die()
        return MortalPending(self, self._own.submit(work))

    def close(self) -> None:
        self._dead = True

    @property
    def closed(self) -> bool:
        return self._dead

    @property
    def place(self) -> Place:
        return here()


@dataclass
class MortalPending:
    sampler: MortalSampler
    pending: PendingDecision

    def result(self) -> DecisionResult:
        self.sampler.die()
        return self.pending.result()


def run(seed: int, start: Callable[[], SamplerHandle], count: int, steps: int = 12) -> int:
    """Sequences come, are decided and go; every token is compared. Returns how many were."""
    random = np.random.default_rng(seed)
    plane = DecisionPlane(start, count, lambda: InlineSampler(Sampler(SETTINGS)), SIZE)
    states: dict[int, SequenceState] = {}
    compared = 0
    for step in range(steps):
        for name in [n for n in states if random.random() < 0.1]:
            plane.close(name)
            states.pop(name).close()
        for _ in range(int(random.integers(0, 4))):
            prompt = tuple(random.integers(0, SIZE, random.integers(1, 30)).tolist())
            resumed = tuple(random.integers(0, SIZE, random.integers(0, 3)).tolist())
            name = step * 10 + len(states) + 1000 * int(random.integers(1, 10**6))
            request = Request(str(name), 0, prompt, parameters_of(random, SIZE), 0, resumed)
            states[name] = SequenceState(request, SIZE, EOS)
            plane.open(name, request, states[name].history)
        asked = [name for name in states if random.random() < 0.8]
        if not asked:
            continue
        rows = [random_row(random, states[name]) for name in asked]
        decisions = plane.submit(step, RowNames(tuple(asked)), candidates_of(rows)).result()
        for name, row, decision in zip(asked, rows, decisions, strict=True):
            expected = reference_token(states[name], row.ids, row.raw, truncated=row.truncated)
            assert (-1 if decision is None else decision.token_id) == expected
            compared += 1
            if decision is not None:
                wants = states[name].parameters.logprobs is not None
                assert (decision.logprobs is not None) == wants
                states[name].append(expected)
                plane.append(name, expected)
    plane.shut_down()
    return compared


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), count=st.sampled_from([1, 2, 4]), threads=st.integers(0, 3))
def test_any_number_of_samplers_decides_like_the_reference(
    seed: int, count: int, threads: int
) -> None:
    """Samplers with some threads each, or in threads of their own."""
    chosen = SamplerSettings(SIZE, EOS, threads=max(threads, 1), capacity=1)
    handle = InlineSampler if threads else ThreadSampler
    run(seed, lambda: handle(Sampler(chosen)), count)


@given(seed=st.integers(0, 2**32), count=st.sampled_from([1, 2, 4]))
def test_lost_samplers_lose_no_decision(seed: int, count: int) -> None:
    deaths = np.random.default_rng(seed)
    run(seed, lambda: MortalSampler(deaths, 0.15), count)


def test_decisions_in_the_engines_thread_are_waited_for() -> None:
    states = SequenceStates(SIZE, EOS, 1)
    states.open(0, Request("0", 0, (1,), SamplingParameters()))
    decisions = OwnDecisions(Sampler(SETTINGS, states), states)
    decisions.submit(0, first_rows(1), candidates_of([TWO_TOKENS])).result()
    assert decisions.counters.hidden == 0 < decisions.counters.busy == decisions.counters.wait


def test_the_tests_compare_many_decisions() -> None:
    assert run(1, lambda: InlineSampler(Sampler(SETTINGS)), 2, steps=60) > 300


def test_sequences_are_spread_over_the_samplers_and_stay() -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Watching:
        def __init__(self) -> None:
            self.log: list[tuple[int, ...]] = []
            seen.append(self.log)
            self._own = InlineSampler(Sampler(SETTINGS))

        def submit(self, work: DecisionWork):  # type: ignore[no-untyped-def]
            assert work.candidates is not None
            self.log.append(work.candidates.rows.sequences)
            return self._own.submit(work)

        def close(self) -> None:
            """Nothing to end."""

    plane = DecisionPlane(Watching, 3, lambda: InlineSampler(Sampler(SETTINGS)), SIZE)
    for name in range(7):
        parameters = SamplingParameters(seed=name)
        plane.open(name, Request(str(name), 0, (1,), parameters), [1])
    for step in range(3):
        plane.submit(step, first_rows(7), candidates_of([TWO_TOKENS] * 7)).result()
    assert sorted(len(log[0]) for log in seen) == [2, 2, 3]
    assert all(log == [log[0]] * 3 for log in seen)


def test_a_failing_sampler_is_not_taken_for_a_dead_one() -> None:
    class Broken(InlineSampler):
        def submit(self, work: DecisionWork):  # type: ignore[no-untyped-def]
            raise RuntimeError("a bug")

    plane = DecisionPlane(lambda: Broken(Sampler(SETTINGS)), 1, lambda: None, SIZE)  # type: ignore[arg-type,return-value]
    plane.open(1, Request("1", 0, (1,), SamplingParameters()), [1])
    with pytest.raises(RuntimeError, match="a bug"):
        plane.submit(0, RowNames((1,)), candidates_of([TWO_TOKENS]))


class Starts:
    """Starts samplers, or fails to: what a machine without memory does."""

    def __init__(self, failures: set[int]) -> None:
        self.count = 0
        self.made: list[MortalSampler] = []
        self._failures = failures

    def __call__(self) -> SamplerHandle:
        self.count += 1
        if self.count - 1 in self._failures:
            raise MemoryError("no room for a sampler")
        self.made.append(MortalSampler(np.random.default_rng(0), 0.0))
        return self.made[-1]


def _plane_of_six(starts: Starts, count: int) -> tuple[DecisionPlane, Candidates]:
    plane = DecisionPlane(starts, count, lambda: InlineSampler(Sampler(SETTINGS)), SIZE)
    for name in range(6):
        plane.open(name, Request(str(name), 0, (1,), SamplingParameters(seed=name)), [1])
    return plane, candidates_of([TWO_TOKENS] * 6)


def _until(plane: DecisionPlane, candidates: Candidates, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < deadline
        plane.submit(0, first_rows(6), candidates).result()
        time.sleep(0.01)


def test_replacements_take_their_share_of_the_sequences() -> None:
    starts = Starts(set())
    plane, candidates = _plane_of_six(starts, 3)
    before = [each.token_id for each in plane.submit(0, first_rows(6), candidates).result() if each]
    for sampler in starts.made[:3]:
        sampler.close()
    after = [each.token_id for each in plane.submit(1, first_rows(6), candidates).result() if each]
    assert after == before
    assert plane.counters.lost == 3
    _until(plane, candidates, lambda: len(plane.load()) == 3)
    assert sorted(plane.load().values()) == [2, 2, 2]
    assert [e.token_id for e in plane.submit(2, first_rows(6), candidates).result() if e] == before
    plane.shut_down()


def test_roles_are_told_while_samplers_and_sequences_come_and_go() -> None:
    """`GET /status` asks in a thread of its own."""
    starts = Starts(set())
    plane, candidates = _plane_of_six(starts, 3)
    told, failed = 0, []
    ended = threading.Event()

    def ask() -> None:
        nonlocal told
        while not ended.is_set():
            try:
                told += sum(int(role.detail.split()[0]) >= 0 for role in plane.roles()) > 0
            except Exception as error:
                failed.append(error)
                return

    asking = threading.Thread(target=ask)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking.start()
    try:
        for step in range(60):
            for name in range(6, 400):
                plane.open(name, Request(str(name), 0, (1,), SamplingParameters(seed=name)), [1])
            if step % 10 == 5:
                starts.made[-1].close()
            plane.submit(step, first_rows(6), candidates).result()
            for name in range(6, 400):
                plane.close(name)
            if failed:
                break
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        asking.join()
        plane.shut_down()
    assert failed == []
    assert told > 10


def test_a_sampler_that_cannot_be_replaced_at_once_is_tried_again() -> None:
    starts = Starts({1})
    plane, candidates = _plane_of_six(starts, 1)
    starts.made[0].close()
    plane.submit(0, first_rows(6), candidates).result()  # the substitute decides
    _until(plane, candidates, lambda: len(starts.made) == 2)
    assert starts.count == 3
    plane.shut_down()


def shut_down_within(seconds: float, plane: DecisionPlane) -> None:
    started = time.monotonic()
    plane.shut_down()
    assert time.monotonic() - started < seconds


def test_shutting_down_does_not_wait_for_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lexshard.actors.decision.plane.SHORTEST_BACKOFF", 100.0)
    monkeypatch.setattr("lexshard.actors.decision.plane.LONGEST_BACKOFF", 200.0)
    monkeypatch.setattr("lexshard.actors.decision.plane.COMING_SECONDS", 100.0)
    starts = Starts({1})
    plane, candidates = _plane_of_six(starts, 1)
    starts.made[0].close()
    _until(plane, candidates, lambda: plane._backoff == 200.0)  # it failed, and will be tried again
    shut_down_within(50.0, plane)
    assert starts.count == 2


def test_shutting_down_does_not_wait_for_a_start_that_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lexshard.actors.decision.plane.COMING_SECONDS", 100.0)
    starts = Starts(set())
    plane, candidates = _plane_of_six(starts, 1)
    begun, ended = threading.Event(), threading.Event()
    plane._starter.submit(lambda: begun.set() or ended.wait(60.0))  # its one thread is busy
    assert begun.wait(20.0)
    starts.made[0].close()
    plane.submit(0, first_rows(6), candidates).result()
    shut_down_within(50.0, plane)
    ended.set()
    assert len(starts.made) == 1


def test_a_sampler_that_finds_no_room_does_not_hold_up_the_end_and_ends_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lexshard.actors.decision.plane.COMING_SECONDS", 0.1)
    room = threading.Event()

    class WaitingForRoom(Starts):
        def __call__(self) -> SamplerHandle:
            if self.made:
                room.wait(60)
            return super().__call__()

    starts = WaitingForRoom(set())
    plane, candidates = _plane_of_six(starts, 1)
    starts.made[0].close()
    plane.submit(0, first_rows(6), candidates).result()
    shut_down_within(5.0, plane)
    assert len(starts.made) == 1
    room.set()
    deadline = time.monotonic() + 20.0
    while not (len(starts.made) == 2 and starts.made[1].closed):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sampler_that_can_be_given_up_does_not_hold_up_the_end_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lexshard.actors.decision.plane.COMING_SECONDS", 100.0)
    closing = threading.Event()
    first = MortalSampler(np.random.default_rng(0), 0.0)
    gave_up = threading.Event()

    def start() -> SamplerHandle:
        if not first.closed:
            return first
        assert closing.wait(60)
        gave_up.set()
        raise SamplerLostError("it is not wanted any more")

    plane = DecisionPlane(start, 1, lambda: InlineSampler(Sampler(SETTINGS)), SIZE, closing=closing)
    plane.open(0, Request("0", 0, (1,), SamplingParameters(seed=0)), [1])
    first.close()
    plane.submit(0, first_rows(1), candidates_of([TWO_TOKENS])).result()
    shut_down_within(50.0, plane)
    assert gave_up.is_set()


def test_what_was_started_is_ended_when_not_all_can_start() -> None:
    starts = Starts({2})
    with pytest.raises(MemoryError):
        DecisionPlane(starts, 3, lambda: InlineSampler(Sampler(SETTINGS)), SIZE)
    assert [sampler.closed for sampler in starts.made] == [True, True]
