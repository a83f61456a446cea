"""Who computes what: everybody finishes, nobody overtakes, no block is lost."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.engine.scheduler import Scheduler, StepPlan
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.kv_cache import BlockPool
from lexshard.actors.messages import Request, SamplingParameters


def _sequence(
    arrival: int, prompt: list[int], output: int, *, priority: int = 0, choice: int = 0
) -> Sequence:
    request = Request(
        str(arrival), choice, tuple(prompt), SamplingParameters(max_tokens=output), priority
    )
    return Sequence(request, arrival, cast(Any, None), list(prompt))


def _commit(scheduler: Scheduler, plan: StepPlan, next_token: int = 7) -> list[Sequence]:
    """Pretend the plan was computed; returns the sequences that finished."""
    finished = []
    for chunk in plan.chunks:
        sequence = chunk.sequence
        sequence.advance(chunk.count, scheduler.pool)
        if chunk.draws:
            sequence.token_ids.append(next_token)
            if sequence.output_length >= sequence.request.parameters.max_tokens:
                scheduler.remove(sequence)
                finished.append(sequence)
    return finished


@settings(deadline=None, max_examples=100)
@given(
    blocks=st.integers(12, 40),
    step_tokens=st.integers(1, 64),
    max_running=st.integers(1, 8),
    jobs=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    data=st.data(),
)
def test_every_sequence_finishes_and_every_block_comes_back(
    blocks: int,
    step_tokens: int,
    max_running: int,
    jobs: list[tuple[int, int, int, bool]],
    data: st.DataObject,
) -> None:
    """Under any budget, with preemption, sharing and cancellation, nothing is starved or leaked."""
    scheduler = Scheduler(BlockPool(blocks), step_tokens=step_tokens, max_running=max_running)
    remaining: set[Sequence] = set()
    for arrival, (prompt, output, priority, shared) in enumerate(jobs):
        first = 0 if shared else arrival * 1000
        sequence = _sequence(arrival, [first + i for i in range(prompt)], output, priority=priority)
        scheduler.add(sequence)
        remaining.add(sequence)
    steps = 0
    while not scheduler.idle:
        plan = scheduler.plan()
        assert plan.chunks, "an engine with work must compute something"
        assert plan.tokens <= step_tokens
        assert scheduler.running <= max_running
        held = [block for chunk in plan.chunks for block in chunk.sequence.blocks]
        assert all(0 <= block < blocks for block in held)
        for finished in _commit(scheduler, plan):
            remaining.remove(finished)
        if remaining and data.draw(st.integers(0, 60)) == 0:
            victim = min(remaining, key=lambda each: each.arrival)
            scheduler.remove(victim)
            remaining.remove(victim)
        scheduler.pool.check()
        steps += 1
        assert steps < 20_000
    assert not remaining
    assert scheduler.pool.used == 0


def test_first_come_first_served_within_a_priority() -> None:
    scheduler = Scheduler(BlockPool(100), step_tokens=64, max_running=1)
    for arrival, priority in enumerate([1, 0, 1, 0]):
        scheduler.add(_sequence(arrival, [arrival] * 20, 2, priority=priority))
    order = []
    while not scheduler.idle:
        order += [done.arrival for done in _commit(scheduler, scheduler.plan())]
    assert order == [1, 3, 0, 2]


def test_a_long_prompt_does_not_stop_those_who_decode() -> None:
    scheduler = Scheduler(BlockPool(100), step_tokens=32, max_running=8)
    scheduler.add(_sequence(0, [1] * 8, 50))
    _commit(scheduler, scheduler.plan())
    scheduler.add(_sequence(1, [2] * 500, 2))
    for _ in range(5):
        plan = scheduler.plan()
        assert plan.chunks[0].sequence.arrival == 0
        assert plan.chunks[0].draws
        assert plan.tokens == 32
        _commit(scheduler, plan)


def test_choices_share_the_prompt_they_have_in_common() -> None:
    """The second choice waits for the first one's prompt, then takes its blocks without a copy."""
    scheduler = Scheduler(BlockPool(100), step_tokens=512, max_running=8)
    for choice in range(4):
        scheduler.add(_sequence(choice, list(range(100)), 3, choice=choice))
    plan = scheduler.plan()
    assert [chunk.count for chunk in plan.chunks] == [100]
    _commit(scheduler, plan)
    plan = scheduler.plan()
    assert sorted(chunk.count for chunk in plan.chunks) == [1, 4, 4, 4]
    shared = {tuple(chunk.sequence.blocks[:6]) for chunk in plan.chunks}
    assert len(shared) == 1


def test_a_preempted_sequence_keeps_its_tokens_and_finishes() -> None:
    scheduler = Scheduler(BlockPool(6), step_tokens=64, max_running=4)
    for arrival in range(2):
        scheduler.add(_sequence(arrival, [arrival] * 30, 40))
    done: list[Sequence] = []
    while not scheduler.idle:
        done += _commit(scheduler, scheduler.plan())
    assert scheduler.preemptions > 0
    assert all(each.output_length == 40 for each in done)
    assert scheduler.pool.used == 0
