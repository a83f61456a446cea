"""CSV-Decode across shards: whatever clusters a shard has, tokens are those of the dense head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_shard, cut_head
from lexshard.actors.states.follower import FollowedSequence, Follower
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from tests.support.cluster_cases import NEEDS
from tests.support.sharded_cases import drawn, every_kind_of_request, hidden_states, shard_of
from tests.support.thread_shards import ThreadGang

SIZE, COLUMNS, CLUSTERS = 480, 24, 32


def clustered(spread: float, *, bias: bool = False) -> ShardPart:
    """A head whose clusters have a radius of about ``spread`` of their distance from the origin."""
    random = np.random.default_rng(7)
    owner = random.permutation(np.arange(SIZE) % CLUSTERS)
    centres = random.standard_normal((CLUSTERS, COLUMNS))
    rows = centres[owner] + spread * random.standard_normal((SIZE, COLUMNS))
    biases = random.standard_normal(SIZE).astype(np.float32)
    return ShardPart(
        weight=torch.from_numpy(rows.astype(np.float32)),
        bias=torch.from_numpy(biases) if bias else None,
        softcap=30.0 if bias else None,
        scale=1.0,
        owned=OwnedRows.every(SIZE),
        eos_ids=(0,),
        largest=8,
        clusters=owner.astype(np.int32),
    )


def owners(part: ShardPart, shards: int, *, whole_clusters: bool) -> list[OwnedRows]:
    """Clusters dealt out in turn, or tokens whatever their clusters."""
    assert part.clusters is not None
    by = part.clusters if whole_clusters else np.arange(SIZE) // 7
    return [OwnedRows.of_tokens(np.flatnonzero(by % shards == r), SIZE) for r in range(shards)]


@contextmanager
def sharded(part: ShardPart, parts: list[OwnedRows]) -> Iterator[CollectiveHead]:
    """Its shards, in as many threads."""
    own, *others = cut_head(part, parts)
    gang = ThreadGang(others)
    head = CollectiveHead(build_shard(own), own.owned.ids, gang.form())
    yield head
    head.close()
    gang.close()


@pytest.mark.parametrize("whole_clusters", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_tokens_are_those_of_the_dense_head(shards: int, whole_clusters: bool) -> None:
    """Every kind of sampling with and without processors, guessed tokens, bias and softcap."""
    part = clustered(0.3, bias=True)
    whole = shard_of(part.weight, part.bias, part.owned, (), part.softcap)
    random = np.random.default_rng(shards)
    engines = SequenceStates(SIZE, part.eos_ids, 2)
    requests = every_kind_of_request(random, SIZE)
    follower = Follower()
    for name, request in enumerate(requests):
        state = engines.open(name, request)
        follower.open(name, FollowedSequence(request, state.history))
    near = SequenceHead(whole, engines)
    with sharded(part, owners(part, shards, whole_clusters=whole_clusters)) as head:
        for _ in range(3):
            names = tuple(name for name in range(len(requests)) for _ in range(2))
            guesses = tuple(random.integers(1, SIZE, 1).tolist())
            drafted = tuple(guesses[:count] for _ in requests for count in range(2))
            rows = RowNames(names, drafted)
            hidden = torch.from_numpy(hidden_states(random, len(names), COLUMNS, 1.0))
            head.tell(follower.take())
            table = engines.table(rows)
            needs = [table.need(row) for row in range(len(table))]
            found = head.candidates(hidden, table, rows)
            expected = near.candidates(hidden, rows)
            assert drawn(found, needs) == drawn(expected, needs)
            every = whole.rescore(whole.screen(hidden, RowTable.of([Need("dense")] * len(names))))
            for row in range(len(names)):
                own = slice(found.offsets[row], found.offsets[row + 1])
                ids = found.ids[own]
                assert (np.diff(ids) > 0).all()
                assert found.raw[own].tobytes() == every.raw[row * SIZE :][ids].tobytes()
            for name in range(len(requests)):
                tokens = tuple(random.integers(1, SIZE, 2).tolist())
                engines[name].append(*tokens)
                follower.append(name, tokens)


@pytest.mark.parametrize("name", NEEDS)
def test_tight_clusters_are_certified_from_a_part_of_the_rows(name: str) -> None:
    """The same certificates, from the same clusters, however they are dealt out."""
    part, need = clustered(0.02), NEEDS[name]
    hidden = hidden_states(np.random.default_rng(1), 16, COLUMNS, 2.0)
    found = []
    for shards in (1, 3):
        with sharded(part, owners(part, shards, whole_clusters=True)) as head:
            found.append(head.candidates(hidden, RowTable.of([need] * 16)))
    one, three = found
    assert one.certificates == three.certificates
    assert one.ids.tolist() == three.ids.tolist()
    certified = [each for each in one.certificates if each.guarantee == "deterministic"]
    assert len(certified) >= 8
    assert all(each.opened_share <= 0.5 for each in certified)


def test_bounds_and_chosen_logits_are_all_that_travels() -> None:
    """Without ids: 4 bytes per cluster and row, and 4 per logit."""
    part = clustered(0.02)
    hidden = hidden_states(np.random.default_rng(1), 16, COLUMNS, 2.0)
    with sharded(part, owners(part, 2, whole_clusters=True)) as head:
        before = head.traffic["gather"].bytes_received
        found = head.candidates(hidden, RowTable.of([NEEDS["top-k"]] * 16))
        received = head.traffic["gather"].bytes_received - before
    logits = sum(each.rescored_rows for each in found.certificates)
    assert all(each.guarantee == "deterministic" for each in found.certificates)
    frames = 3 * 1024  # bounds, a first round, a second
    assert received <= frames + 4 * (16 * CLUSTERS // 2 + logits)
