"""One head over several real processes and gloo: bit for bit what one process finds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from lexshard.actors.collective import (
    CollectiveError,
    CollectiveLostError,
    CollectiveTimeoutError,
    Operation,
    SingleProcess,
    Traffic,
)
from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.shard import Shard
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup
from tests.support.shard_process import EOS_IDS, ShardProcesses, shard_processes
from tests.support.sharded_cases import (
    HeadCase,
    drawn,
    every_kind_of_request,
    hidden_states,
    random_needs,
    same_candidates,
)

LARGEST_WORLD = 4
SECONDS = 2.0
EVERY_KIND = {"top1", "topk", "minp", "nucleus", "nucleus-draw", "epsilon"}


@pytest.fixture(scope="module")
def processes() -> Iterator[ShardProcesses]:
    with shard_processes(LARGEST_WORLD - 1) as started:
        yield started


def group_of(case: HeadCase) -> ShardGroup:
    parts = case.parts()
    return ShardGroup([case.shard(part) for part in parts], [part.ids for part in parts])


def ended(processes: ShardProcesses, case: HeadCase) -> list[str]:
    return [processes.end_of_service(rank).split(" ")[0] for rank in range(1, case.shards)]


def compare_steps(head: CollectiveHead, case: HeadCase, steps: int = 5) -> set[str]:
    """Steps of sequences of every kind, some rows drafted: as the shards answer in one process,
    and with the tokens of one shard. Kinds of need that a certificate decided come back."""
    random = np.random.default_rng(case.seed + 1)
    engines = SequenceStates(case.size, EOS_IDS, 2)
    requests = every_kind_of_request(random, case.size)
    follower = Follower()
    for name, request in enumerate(requests):
        state = engines.open(name, request)
        follower.open(name, FollowedSequence(request, state.history))
    near = SequenceHead(group_of(case), engines)
    whole = SequenceHead(case.shard(OwnedRows.every(case.size)), engines)
    certified = set()
    alive = list(range(len(requests)))
    for step in range(steps):
        names = tuple(name for name in alive for _ in range(3))
        guesses = tuple(random.integers(1, case.size, 2).tolist())
        drafted = [guesses[:count] for _ in alive for count in range(3)] if step % 2 else []
        rows = RowNames(names, tuple(drafted))
        hidden = torch.from_numpy(hidden_states(random, len(names), case.columns))
        head.tell(follower.take())
        table = engines.table(rows)
        needs = [table.need(row) for row in range(len(table))]
        found = head.candidates(hidden, table, rows)
        same_candidates(found, near.candidates(hidden, rows))
        assert drawn(found, needs) == drawn(whole.candidates(hidden, rows), needs)
        certified |= {each.need for each in found.certificates if each.guarantee == "deterministic"}
        for name in alive:
            tokens = tuple(random.integers(1, case.size, random.integers(1, 4)).tolist())
            engines[name].append(*tokens)
            follower.append(name, tokens)
        if step == 2:
            gone = alive.pop(3)
            engines.close(gone)
            follower.close(gone)
    return certified


def compare_needs(head: CollectiveHead, case: HeadCase) -> set[str]:
    """Rows without names, epsilon among them. Both heads are new: crowded rows change the tier."""
    random = np.random.default_rng(case.seed + 2)
    group, whole = group_of(case), case.shard(OwnedRows.every(case.size))
    certified = set()
    for rows in (1, 24, 7):
        needs = [replace(each, adjustment=None) for each in random_needs(random, case.size, rows)]
        hidden = hidden_states(random, rows, case.columns)
        found = head.candidates(hidden, RowTable.of(needs))
        same_candidates(found, group.rescore(group.screen(hidden, RowTable.of(needs))))
        certain = [need.kind != "epsilon" for need in needs]
        pairs = zip(
            drawn(found, needs),
            drawn(whole.rescore(whole.screen(hidden, RowTable.of(needs))), needs),
            certain,
            strict=True,
        )
        assert all(ours == theirs for ours, theirs, sure in pairs if sure)
        certified |= {each.need for each in found.certificates if each.guarantee != "dense"}
    return certified


CASES = [
    HeadCase(2, "round-robin", ("int8",), seed=3),
    HeadCase(2, "uneven", ("int4",), seed=4, bias=True, softcap=20.0),
    HeadCase(3, "tokens", (), seed=5, ties=True),
    HeadCase(4, "contiguous", ("int8",), seed=6, ties=True, bias=True),
    HeadCase(4, "round-robin", ("int4",), seed=7, size=4_000),
    HeadCase(2, "round-robin", ("int8",), seed=11, scale=2.0),  # has certificates of every kind
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shards}-{case.assignment}")
def test_processes_answer_like_one_for_every_need(
    processes: ShardProcesses, case: HeadCase
) -> None:
    """What bounds on the whole softmax decide is agreed on, too."""
    seen = set()
    for compare in (compare_steps, compare_needs):
        head = processes.head(case)
        seen |= compare(head, case)
        head.close()
        assert ended(processes, case) == ["done"] * (case.shards - 1)
    if case is CASES[-1]:
        assert seen == EVERY_KIND


def test_one_process_needs_no_other() -> None:
    case = HeadCase(1, screens=("int8",), seed=8)
    [own] = case.parts()
    for compare in (compare_steps, compare_needs):
        compare(CollectiveHead(case.shard(own), own.ids, SingleProcess()), case)


# -- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_asked_is_refused_and_changes_nothing(processes: ShardProcesses) -> None:
    case = HeadCase(2, seed=9)
    head = processes.head(case)
    states = SequenceStates(case.size, EOS_IDS, 1)
    random = np.random.default_rng(0)
    states.open(0, every_kind_of_request(random, case.size)[-1])
    hidden = hidden_states(random, 2, case.columns)
    with pytest.raises(ValueError, match="SequenceHead"):
        head.candidates(hidden, states.table(RowNames((0, 0))))
    broken = hidden.copy()
    broken[1, 3] = np.inf
    with pytest.raises(NonFiniteHiddenError) as refused:
        head.candidates(broken, RowTable.of([Need("top1")] * 2))
    assert refused.value.rows == (1,)
    with pytest.raises(ValueError, match="2 hidden states of 1 rows"):
        head.candidates(hidden, RowTable.of([Need("top1")]))
    same_candidates(
        head.candidates(hidden, RowTable.of([Need("top1")] * 2)),
        group_of(case).rescore(group_of(case).screen(hidden, RowTable.of([Need("top1")] * 2))),
    )
    head.close()
    head.close()
    with pytest.raises(CollectiveError, match="closed"):
        head.candidates(hidden, RowTable.of([Need("top1")] * 2))
    assert ended(processes, case) == ["done"]


def test_tokens_that_nobody_owns_are_missed_before_the_first_step(
    processes: ShardProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = HeadCase(2, seed=9)
    own = case.parts()[0]
    monkeypatch.setattr(
        HeadCase, "parts", lambda self: [OwnedRows.of_blocks([0], own.vocabulary_size)]
    )
    with pytest.raises(ValueError, match="every token"):
        processes.head(case)
    assert ended(processes, case) == ["CollectiveLostError"]


# -- bytes ----------------------------------------------------------------------------------------


def exchanged(traffic: Mapping[Operation, Traffic]) -> int:
    """Bytes sent and received so far, hidden states apart."""
    return sum(
        each.bytes_sent + each.bytes_received for name, each in traffic.items() if name != "hidden"
    )


@pytest.mark.parametrize("shards", [2, 4])
def test_top_50_of_128_256_tokens_takes_less_than_4_kilobytes_per_token_and_shard(
    processes: ShardProcesses, shards: int
) -> None:
    """All that is exchanged, hidden states apart; the full logits would be 513 KB."""
    case = HeadCase(shards, "round-robin", ("int8",), size=128_256, columns=64)
    head = processes.head(case)
    random = np.random.default_rng(0)
    for rows in (1, 16):
        before = exchanged(head.traffic), head.traffic["hidden"].bytes_sent
        for _ in range(4):
            needs = [
                Need("topk", k=50, key=row, position=7, inverse_temperature=1.0)
                for row in range(rows)
            ]
            hidden = hidden_states(random, rows, case.columns, 1.0)
            found = head.candidates(hidden, RowTable.of(needs))
            assert all(each.guarantee == "deterministic" for each in found.certificates)
        shared = 4 * rows * (shards - 1)
        assert head.traffic["hidden"].bytes_sent - before[1] == shared * case.columns * 4
        per_token = (exchanged(head.traffic) - before[0]) / shared
        print(f"{shards} shards, {rows} rows: {per_token:.0f} bytes per token and shard")
        assert per_token <= 4096
    head.close()
    assert ended(processes, case) == ["done"] * (shards - 1)


# -- processes that hang, die or leave ------------------------------------------------------------


def ask(head: CollectiveHead, case: HeadCase) -> None:
    hidden = hidden_states(np.random.default_rng(0), 2, case.columns)
    head.candidates(hidden, RowTable.of([Need("top1"), Need("topk", k=5)]))


def test_a_root_that_stays_away_in_the_midst_of_a_step_is_not_waited_for(
    processes: ShardProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = HeadCase(2, seed=1)
    head = processes.head(case, seconds=1.0)
    told: list[str] = []
    # Where the root would rescore, it waits for the end of the other.
    monkeypatch.setattr(Shard, "rescore", lambda *_: told.append(processes.end_of_service(1)))
    started = time.monotonic()
    with pytest.raises(CollectiveError):
        ask(head, case)
    assert told[0].startswith("CollectiveTimeoutError 0")
    assert 1.0 <= time.monotonic() - started < 10.0


def test_an_error_in_the_midst_of_a_step_ends_the_group(processes: ShardProcesses) -> None:
    case = HeadCase(2, seed=1)
    head = processes.head(case)
    with pytest.raises(Exception, match="shape"):
        head.candidates(np.ones((1, case.columns + 1), np.float32), RowTable.of([Need("top1")]))
    with pytest.raises(CollectiveError, match="failed"):
        ask(head, case)
    assert ended(processes, case) != ["done"]


def test_servers_notice_a_root_that_leaves_without_a_word(processes: ShardProcesses) -> None:
    case = HeadCase(3, seed=1)
    head = processes.head(case)
    ask(head, case)
    head._collective.close()
    assert ended(processes, case) == ["CollectiveLostError"] * 2


def test_who_rests_is_waited_for_beyond_the_time_out(processes: ShardProcesses) -> None:
    """A group that has nothing to do for longer than a step may take is still one."""
    case = HeadCase(2, seed=1)
    head = processes.head(case, seconds=0.5)
    time.sleep(1.2)
    ask(head, case)
    head.close()
    assert ended(processes, case) == ["done"]


def test_a_stopped_process_is_named_in_time_and_the_same_form_anew(
    processes: ShardProcesses,
) -> None:
    case = HeadCase(3, seed=1)
    head = processes.head(case, SECONDS)
    ask(head, case)
    stopped = processes.processes[1].pid
    os.kill(stopped, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as late:
        ask(head, case)
    noticed = time.monotonic() - started
    assert SECONDS <= noticed < SECONDS + 10
    assert late.value.rank == 2
    with pytest.raises(CollectiveTimeoutError):  # there is no way back
        ask(head, case)
    assert processes.end_of_service(1).startswith("CollectiveLostError 0")
    os.kill(stopped, signal.SIGCONT)
    assert processes.end_of_service(2).startswith("CollectiveLostError 0")
    head = processes.head(case)
    ask(head, case)
    head.close()
    assert ended(processes, case) == ["done"] * 2


def test_a_killed_process_is_named_at_once(processes: ShardProcesses) -> None:
    """By the root; the others notice that the root has given up. (The last test: it stays dead.)"""
    case = HeadCase(LARGEST_WORLD, seed=1)
    head = processes.head(case)
    ask(head, case)
    processes.processes[1].kill()
    started = time.monotonic()
    with pytest.raises(CollectiveLostError) as lost:
        ask(head, case)
    assert lost.value.rank == 2
    for rank in (1, 3):
        assert processes.end_of_service(rank).startswith("CollectiveLostError 0")
    assert time.monotonic() - started < 10
