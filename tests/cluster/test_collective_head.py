"""One head over several real processes and gloo: bit for bit what one process finds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.collective import (
    CollectiveError,
    CollectiveLostError,
    CollectiveTimeoutError,
    SingleProcess,
)
from actors.head.output_rows import NonFiniteHiddenError
from actors.head.owned_rows import OwnedRows
from actors.head.sequence_head import SequenceHead
from actors.head.sharded.collective_head import CollectiveHead, CollectiveSequenceHead
from actors.head.shard_group import ShardGroup
from actors.states.deltas import OpenSequence, Outbox
from actors.states.need import Need
from actors.states.sequence_state import SequenceStates
from tests.support.sharded_cases import (
    ASSIGNMENTS,
    HeadCase,
    drawn,
    every_kind_of_request,
    hidden_states,
    random_needs,
    same_candidates,
)
from tests.support.shard_process import EOS_IDS, ShardProcesses, shard_processes

LARGEST_WORLD = 4
SECONDS = 2.0
EVERY_KIND = {"top1", "topk", "minp", "nucleus", "epsilon", "dense"}


@pytest.fixture(scope="module")
def processes() -> Iterator[ShardProcesses]:
    with shard_processes(LARGEST_WORLD - 1) as started:
        yield started


def group_of(case: HeadCase) -> ShardGroup:
    parts = case.parts()
    return ShardGroup([case.shard(part) for part in parts], [part.ids for part in parts])


def ended(processes: ShardProcesses, case: HeadCase) -> list[str]:
    return [processes.end_of_service(rank).split(" ")[0] for rank in range(1, case.shards)]


def compare_steps(head: CollectiveHead, case: HeadCase, steps: int) -> set[str]:
    """Steps of sequences of every kind, some rows drafted: as the shards answer in one process,
    and with the tokens of one shard. Kinds of need that a certificate decided come back."""
    random = np.random.default_rng(case.seed + 1)
    engines = SequenceStates(case.size, EOS_IDS, 2)
    requests = every_kind_of_request(random, case.size)
    outbox = Outbox()
    for name, request in enumerate(requests):
        engines.open(name, request)
        outbox.open(OpenSequence(name, request))
    far = CollectiveSequenceHead(head, engines)
    near = SequenceHead(group_of(case), engines)
    whole = SequenceHead(case.shard(OwnedRows.every(case.size)), engines)
    certified = set()
    alive = list(range(len(requests)))
    for step in range(steps):
        names = [name for name in alive for _ in range(3)]
        guesses = tuple(random.integers(1, case.size, 2).tolist())
        drafted = [guesses[:count] for _ in alive for count in range(3)] if step % 2 else []
        hidden = torch.from_numpy(hidden_states(random, len(names), case.columns))
        head.tell(outbox.take())
        found = far.candidates(hidden, names, drafted)
        same_candidates(found, near.candidates(hidden, names, drafted))
        needs = engines.needs(names, drafted)
        assert drawn(found, needs) == drawn(whole.candidates(hidden, names, drafted), needs)
        certified |= {
            each.need for each in found.certificates if each.guarantee == "deterministic"
        }
        for name in alive:
            tokens = tuple(random.integers(1, case.size, random.integers(1, 4)).tolist())
            engines[name].append(*tokens)
            outbox.append(name, tokens)
        if step == 2:
            gone = alive.pop(3)
            engines.close(gone)
            outbox.close(gone)
    return certified


def compare_needs(head: CollectiveHead, case: HeadCase) -> set[str]:
    """Rows that nobody named, epsilon among them."""
    random = np.random.default_rng(case.seed + 2)
    group, whole = group_of(case), case.shard(OwnedRows.every(case.size))
    certified = set()
    for rows in (1, 24, 7):
        needs = [replace(each, adjustment=None) for each in random_needs(random, case.size, rows)]
        hidden = hidden_states(random, rows, case.columns)
        found = head.rescore(head.screen(hidden, needs))
        same_candidates(found, group.rescore(group.screen(hidden, needs)))
        certain = [need.kind != "epsilon" for need in needs]
        pairs = zip(
            drawn(found, needs),
            drawn(whole.rescore(whole.screen(hidden, needs)), needs),
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shards}-{case.assignment}")
def test_processes_answer_like_one_for_every_need(
    processes: ShardProcesses, case: HeadCase
) -> None:
    head = processes.head(case)
    compare_steps(head, case, 5)
    compare_needs(head, case)
    head.close()
    assert ended(processes, case) == ["done"] * (case.shards - 1)
