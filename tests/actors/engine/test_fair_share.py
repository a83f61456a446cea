"""What a step computes: clients get equal parts of every step, all finish, and no block is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Sequenced
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.engine.fair_share import FairShare
from lexshard.actors.engine.prompt_scores import SCORED_ROW_TOKENS
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.step_plan import StepPlan
from lexshard.actors.kv_cache import BlockPool, block_hash
from lexshard.actors.messages import Drafts, Request, SamplingParameters

MANY_BLOCKS = 3_000


class Clients:
    """Clients of one scheduler, whose plans are pretended to be computed."""

    def __init__(self, *, step_tokens: int, max_running: int, blocks: int = MANY_BLOCKS) -> None:
        self.scheduler = Scheduler(
            BlockPool(blocks), step_tokens=step_tokens, max_running=max_running
        )
        self.unfinished: set[Sequence] = set()
        self.served: Counter[str] = Counter()  # step tokens by client
        self._arrivals = 0

    def submit(
        self,
        client: str,
        prompt: int,
        output: int = 1,
        *,
        priority: int = 0,
        scored: bool = False,
        same: bool = False,
    ) -> Sequence:
        """``same`` prompts of a length are equal."""
        self._arrivals += 1
        name = self._arrivals
        parameters = SamplingParameters(max_tokens=output, prompt_logprobs=20 if scored else None)
        first = 0 if same else name * 10_000
        prompt_ids = tuple(range(first, first + prompt))
        request = Request(str(name), 0, prompt_ids, parameters, priority, client=client)
        sequence = Sequence(request, name, cast(Any, None), list(prompt_ids))
        self.scheduler.add(sequence)
        self.unfinished.add(sequence)
        return sequence

    def waiting(self) -> list[Sequence]:
        return [each for each in self.unfinished if not each.blocks]

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self.served[sequence.request.client] += sequence.cost(0, chunk.count)
            if sequence.scores is not None:
                sequence.scores.entries += [None] * len(chunk.scored)
            sequence.advance(chunk.count, self.scheduler.pool)
            if chunk.draws:
                sequence.token_ids.append(7)
                if sequence.output_length >= sequence.request.parameters.max_tokens:
                    self.scheduler.remove(sequence)
                    self.unfinished.remove(sequence)
        return plan


def tokens_of(plan: StepPlan) -> dict[int, int]:
    return {chunk.sequence.arrival: chunk.count for chunk in plan.chunks}


# -- one client -----------------------------------------------------------------------------------


def first_come_first_served(
    jobs: Sequenced[tuple[int, int]], step_tokens: int, max_running: int
) -> list[dict[int, int]]:
    """The steps of jobs (prompt, output), in order and without any notion of a client."""
    behind = {name: prompt for name, (prompt, _) in enumerate(jobs, 1)}
    wanted = {name: output for name, (_, output) in enumerate(jobs, 1)}
    running: list[int] = []
    steps = []
    while behind:
        step: dict[int, int] = {}
        budget = step_tokens
        for name in list(behind):
            if not budget or (name not in running and len(running) == max_running):
                break
            if name not in running:
                running.append(name)
            step[name] = min(behind[name], budget)
            budget -= step[name]
        for name, count in step.items():
            behind[name] -= count
            if not behind[name]:
                behind[name] = 1
                wanted[name] -= 1
                if not wanted[name]:
                    del behind[name]
                    running.remove(name)
        steps.append(step)
    return steps


@settings(deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=12),
    step_tokens=st.integers(1, 64),
    max_running=st.integers(1, 8),
)
def test_one_client_alone_is_served_first_come_first_served(
    jobs: list[tuple[int, int]], step_tokens: int, max_running: int
) -> None:
    clients = Clients(step_tokens=step_tokens, max_running=max_running)
    for prompt, output in jobs:
        clients.submit("alone", prompt, output)
    steps = []
    while not clients.scheduler.idle:
        steps.append(tokens_of(clients.step()))
    assert steps == first_come_first_served(jobs, step_tokens, max_running)


# -- several --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(prompts=st.lists(st.integers(1, 6), min_size=2, max_size=6), step_tokens=st.integers(1, 200))
def test_prompts_of_clients_get_equal_parts(prompts: list[int], step_tokens: int) -> None:
    """However many prompts each has waiting, the tokens computed never differ by more than one."""
    clients = Clients(step_tokens=step_tokens, max_running=64)
    for client, count in enumerate(prompts):
        for _ in range(count):
            clients.submit(str(client), 4_000)
    for _ in range(12):
        assert clients.step().tokens == step_tokens
        served = [clients.served[str(client)] for client in range(len(prompts))]
        assert max(served) - min(served) <= 1


@settings(deadline=None)
@given(scored=st.lists(st.booleans(), min_size=2, max_size=4), step_tokens=st.integers(4, 200))
def test_scored_prompts_count_for_what_they_cost(scored: list[bool], step_tokens: int) -> None:
    """A step's budget holds with them, and parts are equal but for less than two rows."""
    clients = Clients(step_tokens=step_tokens, max_running=64)
    for client, wants in enumerate(scored):
        clients.submit(str(client), 4_000, scored=wants)
    for _ in range(10):
        before = clients.served.copy()
        plan = clients.step()
        cost = {name: clients.served[name] - before[name] for name in map(str, range(len(scored)))}
        assert sum(cost.values()) < step_tokens + SCORED_ROW_TOKENS
        assert plan.tokens + (SCORED_ROW_TOKENS - 1) * sum(
            len(chunk.scored) for chunk in plan.chunks
        ) == sum(cost.values())
        if step_tokens >= len(scored) * SCORED_ROW_TOKENS:
            assert max(cost.values()) - min(cost.values()) < len(scored) * SCORED_ROW_TOKENS


@settings(deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 80), st.integers(1, 9)),
        min_size=1,
        max_size=20,
    ),
    step_tokens=st.integers(1, 64),
)
def test_no_budget_is_left_while_anything_is_to_be_computed(
    jobs: list[tuple[str, int, int]], step_tokens: int
) -> None:
    clients = Clients(step_tokens=step_tokens, max_running=64)
    for job in jobs:
        clients.submit(*job)
    while not clients.scheduler.idle:
        wanted = sum(sequence.uncomputed for sequence in clients.unfinished)
        assert clients.step().tokens == min(step_tokens, wanted)


@settings(deadline=None)
@given(
    blocks=st.integers(12, 40),
    step_tokens=st.integers(1, 64),
    max_running=st.integers(1, 8),
    jobs=st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.integers(1, 90),
            st.integers(1, 40),
            st.integers(0, 2),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=14,
    ),
    data=st.data(),
)
def test_every_sequence_finishes_and_every_block_comes_back(
    blocks: int,
    step_tokens: int,
    max_running: int,
    jobs: list[tuple[str, int, int, int, bool, bool]],
    data: st.DataObject,
) -> None:
    """Too little memory, few places, priorities, scored and equal prompts, arrivals and
    cancellations at any time."""
    clients = Clients(step_tokens=step_tokens, max_running=max_running, blocks=blocks)
    jobs = list(jobs)
    steps = 0
    while jobs or not clients.scheduler.idle:
        while jobs and (clients.scheduler.idle or data.draw(st.booleans())):
            client, prompt, output, priority, scored, same = jobs.pop()
            clients.submit(client, prompt, output, priority=priority, scored=scored, same=same)
        plan = clients.step()
        assert plan.chunks, "an engine with work must compute something"
        assert plan.tokens <= step_tokens
        assert clients.scheduler.running <= max_running
        if clients.unfinished and data.draw(st.integers(0, 60)) == 0:
            victim = min(clients.unfinished, key=lambda each: each.arrival)
            clients.scheduler.remove(victim)
            clients.unfinished.remove(victim)
        clients.scheduler.pool.check()
        steps += 1
        assert steps < 20_000
    assert not clients.unfinished
    assert clients.scheduler.pool.used == 0


@pytest.mark.parametrize("max_running", [4, 256])
@pytest.mark.parametrize("running_for", [1, 7, 60])
def test_a_hundred_long_prompts_do_not_hold_up_another_client(
    max_running: int, running_for: int
) -> None:
    """Two tokens of another client take two steps, whether there is a place left or not."""
    clients = Clients(step_tokens=512, max_running=max_running)
    for _ in range(100):
        clients.submit("greedy", 1_900, 30)
    for _ in range(running_for):
        clients.step()
    short = clients.submit("modest", 5, 2)
    for _ in range(2):
        clients.step()
    assert short not in clients.unfinished
    assert clients.scheduler.preemptions <= 1


@pytest.mark.parametrize("running_for", [1, 10, 26, 40, 60])
def test_choices_of_a_scored_prompt_do_not_hold_up_another_client(running_for: int) -> None:
    """While their prompt is scored, and while one after the other is told."""
    clients = Clients(step_tokens=512, max_running=64)
    for _ in range(128):
        clients.submit("choices", 1_900, 16, scored=True, same=True)
    for _ in range(running_for):
        clients.step()
    short = clients.submit("modest", 5, 2)
    for _ in range(2):
        clients.step()
    assert short not in clients.unfinished


def test_a_place_is_taken_from_a_client_that_holds_more_than_an_equal_part() -> None:
    clients = Clients(step_tokens=64, max_running=6)
    many = [clients.submit("many", 4, 500) for _ in range(9)]
    clients.step()
    one = clients.submit("one", 4, 500)
    plan = clients.step()
    assert {chunk.sequence for chunk in plan.chunks} == {*many[:5], one}
    assert clients.scheduler.preemptions == 1
    # A client that runs something already waits for a free place.
    clients.submit("one", 4, 500)
    clients.step()
    assert clients.scheduler.preemptions == 1
    # With as many clients as places each keeps the one it has.
    for client in "abcdefgh":
        clients.submit(client, 4, 500)
        clients.step()
    running = Counter(chunk.sequence.request.client for chunk in clients.step().chunks)
    assert running == {"many": 1, "one": 1, "a": 1, "b": 1, "c": 1, "d": 1}
    assert clients.scheduler.preemptions == 5


def test_blocks_are_taken_from_a_client_that_runs_more_than_an_equal_part() -> None:
    """Another client's long sequences hold all the memory there is."""
    clients = Clients(step_tokens=512, max_running=64, blocks=64)
    for _ in range(8):
        clients.submit("long", 250, 300)
    for _ in range(4):
        clients.step()
    short = clients.submit("short", 100, 2)
    for _ in range(4):
        clients.step()
    assert short not in clients.unfinished


def test_a_preempted_sequence_goes_on_when_there_is_a_place() -> None:
    """A client that comes again and again costs the other at most one preemption each time."""
    clients = Clients(step_tokens=64, max_running=2)
    first, second = clients.submit("many", 40, 60), clients.submit("many", 40, 60)
    clients.step()
    visits = 0
    while {first, second} & clients.unfinished:
        short = clients.submit("other", 3, 2)
        visits += 1
        while short in clients.unfinished:
            clients.step()
        clients.step()
    assert clients.scheduler.preemptions <= visits


@pytest.mark.slow
@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=4),
    max_running=st.integers(1, 6),
)
def test_clients_that_always_wait_are_served_alike(
    sizes: list[tuple[int, int]], max_running: int
) -> None:
    """Where places are short, with requests of any size: what clients are given differs by no more
    than what the sequences that run may take."""
    clients = Clients(step_tokens=2_000, max_running=max_running)
    for client, (prompt, output) in enumerate(sizes):
        for _ in range(60):
            clients.submit(str(client), prompt, output)
    most = max_running * max(prompt + 2 * output for prompt, output in sizes)
    drawn: Counter[str] = Counter()
    while len({each.request.client for each in clients.waiting()}) == len(sizes):
        for chunk in clients.step().chunks:
            drawn[chunk.sequence.request.client] += chunk.draws
        served = [clients.served[str(i)] + drawn[str(i)] for i in range(len(sizes))]
        assert max(served) - min(served) <= 2 * most


def test_streams_go_before_prompts_and_priority_before_both() -> None:
    clients = Clients(step_tokens=16, max_running=8)
    stream = clients.submit("a", 4, 100, priority=1)
    clients.step()
    prompt = clients.submit("b", 1_000, priority=1)
    plan = clients.step()
    assert tokens_of(plan) == {stream.arrival: 1, prompt.arrival: 15}
    urgent = clients.submit("c", 40)
    for count in (16, 16, 8):
        assert tokens_of(clients.step())[urgent.arrival] == count


def test_first_come_first_served_within_a_priority() -> None:
    clients = Clients(step_tokens=64, max_running=1)
    for priority in (1, 0, 1, 0):
        clients.submit("a", 20, 2, priority=priority)
    order = []
    while before := set(clients.unfinished):
        clients.step()
        order += [done.arrival for done in before - clients.unfinished]
    assert order == [2, 4, 1, 3]


def test_choices_share_the_prompt_they_have_in_common() -> None:
    """The others wait for the first one's prompt, then take its blocks without a copy."""
    clients = Clients(step_tokens=512, max_running=8)
    for _ in range(4):
        clients.submit("a", 100, 3, same=True)
    assert tokens_of(clients.step()) == {1: 100}
    plan = clients.step()
    assert tokens_of(plan) == {1: 1, 2: 4, 3: 4, 4: 4}
    assert len({tuple(chunk.sequence.blocks[:6]) for chunk in plan.chunks}) == 1


def test_equal_prompts_of_other_clients_are_not_waited_for() -> None:
    """A client's own choices wait for the first one's prompt; another client never does."""
    clients = Clients(step_tokens=64, max_running=8)
    for client in "aab":
        clients.submit(client, 200, same=True)
    assert tokens_of(clients.step()) == {1: 32, 3: 32}


# -- what goes on, and what waits -----------------------------------------------------------------


def test_one_that_waits_for_guesses_from_outside_holds_up_no_other() -> None:
    """Until they come: then it is in the next plan."""
    clients = Clients(step_tokens=64, max_running=8)
    waits, _ = clients.submit("a", 20, 90), clients.submit("a", 20, 90)
    clients.step()
    waits.held = True
    scheduler, plan = clients.scheduler, clients.scheduler.plan()
    assert scheduler.room_for_run(plan, 5) == 5
    assert scheduler.follow(plan) is not None
    waits.hear(Drafts("1", 0, len(waits.token_ids), (7,)))
    assert scheduler.room_for_run(plan, 5) == 1
    assert scheduler.follow(plan) is None


def test_those_that_wait_for_a_place_hold_up_no_other_without_a_right_to_one() -> None:
    for names, right in (("aaa", True), ("abc", False)):
        clients = Clients(step_tokens=64, max_running=2)
        for name in names:
            clients.submit(name, 20, 90)
        clients.step()
        plan = clients.scheduler.plan()
        assert clients.scheduler.room_for_run(plan, 5) == 5
        urgent = clients.submit("d", 20, 90, priority=-1)
        assert clients.scheduler.room_for_run(plan, 5) == (1 if right else 5)
        assert (urgent.arrival in tokens_of(clients.step())) == right


def test_one_that_waits_for_blocks_looks_its_prefix_up_where_that_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When others have computed what follows in it, or blocks come back."""
    hashed: list[Sequenced[int]] = []

    def hashing(parent: bytes, token_ids: Sequenced[int]) -> bytes:
        hashed.append(token_ids)
        return block_hash(parent, token_ids)

    clients = Clients(step_tokens=512, max_running=8, blocks=64)
    clients.submit("a", 320, same=True)
    runs = clients.submit("a", 600, 90)
    while not runs.decodes:
        clients.step()
    waits = clients.submit("a", 500, same=True)
    monkeypatch.setattr("lexshard.actors.engine.sequence.block_hash", hashing)
    plans = [clients.step() for _ in range(10)]
    assert 20 < len(hashed) < 30
    clients.submit("b", 340, 90, same=True, priority=-1)
    plans += [clients.step() for _ in range(2)]
    assert 60 < len(hashed) < 70  # of the newcomer's prefix, and once more of its own
    plans += [clients.step() for _ in range(5)]
    assert 60 < len(hashed) < 70
    assert not any(waits.arrival in tokens_of(plan) for plan in plans)
    clients.scheduler.remove(runs)
    assert waits.arrival in tokens_of(clients.step())


# -- counters -------------------------------------------------------------------------------------


def _waiting(client: str, arrival: int) -> Sequence:
    request = Request(str(arrival), 0, (1,), SamplingParameters(), client=client)
    return Sequence(request, arrival, cast(Any, None), [1])


def test_a_newcomer_starts_with_the_least_of_those_that_wait() -> None:
    share = FairShare()
    old, busy = _waiting("old", 0), _waiting("busy", 1)
    for each in (old, busy):
        share.open(each)
    share.charge("old", 500)
    share.charge("busy", 300)
    share.open(_waiting("new", 2))
    assert share.served("new") == 300
    assert share.in_turn(["old", "new", "busy"]) == ["busy", "new", "old"]
    # A client that comes back has saved nothing up, and one that ran ahead still has.
    share.leave(busy)
    share.charge("new", 400)
    share.wait(busy)
    assert share.served("busy") == 500
    share.leave(old)
    share.charge("old", 400)
    share.wait(old)
    assert share.served("old") == 900


def test_a_client_that_has_nothing_left_is_forgotten() -> None:
    share = FairShare()
    one = _waiting("one", 0)
    share.open(one)
    share.charge("one", 10)
    share.leave(one)
    share.close(one)
    assert share.idle
    share.open(_waiting("one", 1))
    assert share.served("one") == 0
