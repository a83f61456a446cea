"""Every token is owned once, blocks and clusters stay whole, and no shard is much larger."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.candidates import Candidates
from lexshard.actors.configuration import ShardAssignmentMethod
from lexshard.actors.head.shard import Shard
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.cluster.topology.assignment import (
    CLUSTER_BALANCE,
    AssignmentError,
    ShardAssignment,
    assign,
)
from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.bounds import Clusters
from lexshard.kernels.noise import gumbel_row
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup

METHODS = get_args(ShardAssignmentMethod)
BY_BLOCK = [method for method in METHODS if method.startswith("blocks")]
BY_CLUSTER = [method for method in METHODS if method.startswith("clusters")]
EVEN = 1.05


def made_clusters(
    sizes: npt.NDArray[np.int64], centroid: npt.NDArray[np.float32] | None = None, seed: int = 0
) -> Clusters:
    """Clusters of random tokens with these sizes; what bounds need of them is left empty."""
    generator = np.random.default_rng(seed)
    total, count = int(sizes.sum()), len(sizes)
    if centroid is None:
        centroid = generator.standard_normal((count, 4)).astype(np.float32)
    none = np.zeros(count, np.float32)
    return Clusters(
        order=generator.permutation(total).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        centroid=centroid,
        radius=none,
        direction=centroid,
        angular_radius=none,
        largest_norm=none,
        smallest_norm=none,
        bias_values=none[:, None],
        bias_ids=none[:, None].astype(np.int32),
    )


def zipf_counts(size: int, seed: int) -> npt.NDArray[np.int64]:
    """Counts of a trace in which few tokens are most of it and many never occur."""
    generator = np.random.default_rng(seed)
    ranks = generator.permutation(size) + 1
    counts: npt.NDArray[np.int64] = generator.poisson(20.0 * size / ranks**1.1 / 10)
    counts[0] += 1
    return counts


def owned_ids(assignment: ShardAssignment) -> list[npt.NDArray[np.int32]]:
    return [own.ids for own in assignment.owned]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40_000),
    shards=st.integers(1, 16),
    method=st.sampled_from(BY_BLOCK),
    seed=st.integers(0, 99),
)
def test_blocks_are_owned_whole_and_once(size: int, shards: int, method: str, seed: int) -> None:
    counts = zipf_counts(size, seed)
    if shards > blocks_of(size):
        with pytest.raises(AssignmentError, match=f"give --shards {blocks_of(size)} or fewer"):
            assign(method, size, shards, counts=counts)  # type: ignore[arg-type]
        return
    assignment = assign(method, size, shards, counts=counts)  # type: ignore[arg-type]
    ids = owned_ids(assignment)
    assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(size))
    for own, rows in zip(ids, assignment.rows, strict=True):
        assert len(own) == rows > 0
        assert (np.diff(own) > 0).all()
        blocks = np.unique(own // BLOCK)
        assert len(own) == sum(min(BLOCK, size - BLOCK * block) for block in blocks)
    assert all(own.by_block for own in assignment.owned)
    # Nobody has more than a block above an equal number of blocks.
    assert max(assignment.rows) <= BLOCK * -(-blocks_of(size) // shards)
    if blocks_of(size) >= 20 * shards + shards:
        assert assignment.row_balance <= EVEN
    assert assignment.work is not None
    assert sum(assignment.work) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=80),
    shards=st.integers(1, 9),
    method=st.sampled_from(BY_CLUSTER),
    seed=st.integers(0, 99),
)
def test_clusters_are_owned_whole_and_once(
    sizes: list[int], shards: int, method: str, seed: int
) -> None:
    rows = np.array([*sizes, 1], np.int64)
    clusters = made_clusters(rows, seed=seed)
    size, filled = int(rows.sum()), int((rows > 0).sum())
    counts = zipf_counts(size, seed)
    if shards > filled:
        with pytest.raises(AssignmentError, match=f"the {filled} clusters of the index"):
            assign(method, size, shards, clusters=clusters, counts=counts)  # type: ignore[arg-type]
        return
    assignment = assign(method, size, shards, clusters=clusters, counts=counts)  # type: ignore[arg-type]
    ids = owned_ids(assignment)
    assert np.array_equal(np.sort(np.concatenate(ids)), np.arange(size))
    assert all((np.diff(own) > 0).all() and len(own) for own in ids)
    owner = np.empty(size, np.int64)
    for shard, own in enumerate(ids):
        owner[own] = shard
    for cluster in range(len(rows)):
        span = clusters.order[clusters.offsets[cluster] : clusters.offsets[cluster + 1]]
        assert len(set(owner[span].tolist())) <= 1
    if method == "clusters-hotness" and max(rows) * 20 * shards <= size:
        assert assignment.row_balance <= CLUSTER_BALANCE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_no_token_depends_on_the_assignment(method: ShardAssignmentMethod, shards: int) -> None:
    """Greedy, drawn and top-k: shards that own so much leave the tokens that one shard leaves."""
    generator = np.random.default_rng(1)
    sizes = generator.integers(5, 60, 20)
    size = int(sizes.sum())
    weight = torch.from_numpy(generator.standard_normal((size, 16)).astype(np.float32))
    hidden = generator.standard_normal((6, 16)).astype(np.float32)
    needs = [
        Need(kind="top1"),
        Need(kind="top1", inverse_temperature=1.0, key=3, position=9),
        Need(kind="topk", k=7),
    ] * 2
    assignment = assign(
        method, size, shards, clusters=made_clusters(sizes), counts=zipf_counts(size, 1)
    )
    parts = assignment.owned
    group = ShardGroup(
        [
            Shard(weight[torch.from_numpy(own.ids).long()], None, None, 1.0, size, owned=own)
            for own in parts
        ],
        [own.ids for own in parts],
    )
    one = Shard(weight, None, None, 1.0, size)
    expected, found = (
        head.rescore(head.screen(hidden, RowTable.of(needs))) for head in (one, group)
    )
    for row, need in enumerate(needs):
        theirs, ours = (best_of(each, row, need) for each in (expected, found))
        assert theirs == ours


def best_of(candidates: Candidates, row: int, need: Need) -> list[tuple[float, int]]:
    """The tokens that ``need`` asks for with their values, best first."""
    own = slice(candidates.offsets[row], candidates.offsets[row + 1])
    ids, values = candidates.ids[own], candidates.raw[own].astype(np.float64)
    if need.inverse_temperature:
        noise = gumbel_row(need.key, need.position, 2048)
        values = values + noise[ids]
    order = np.lexsort((ids, -values))[: need.k or 1]
    return [(float(values[place]), int(ids[place])) for place in order]


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_hot_blocks_are_spread_as_evenly_as_the_hottest_allows(shards: int) -> None:
    """A real size: rows within 1%, work within 5% (no block is hotter than a shard's part)."""
    size = 131_072
    counts = np.zeros(size, np.int64)
    counts[np.random.default_rng(3).permutation(size)] = 1_000_000 // (np.arange(size) + 50)
    hot = assign("blocks-hotness", size, shards, counts=counts)
    assert hot.row_balance <= 1.01
    assert hot.work_balance is not None
    assert hot.work_balance <= EVEN
    # Tokenizers give frequent tokens low ids, which is bad for contiguous blocks.
    by_rank = np.sort(counts)[::-1].copy()
    contiguous = assign("blocks-contiguous", size, shards, counts=by_rank)
    again = assign("blocks-hotness", size, shards, counts=by_rank)
    assert contiguous.work_balance is not None
    assert again.work_balance is not None
    assert again.work_balance < contiguous.work_balance


@pytest.mark.parametrize("shards", [2, 3, 4, 6])
def test_semantic_parts_keep_near_clusters_together(shards: int) -> None:
    """Clusters around ``shards`` far points: every point's clusters are on one shard."""
    generator = np.random.default_rng(shards)
    per_point = 12
    points = 40.0 * generator.standard_normal((shards, 16))
    group = generator.permutation(np.repeat(np.arange(shards), per_point))
    centroid = points[group] + generator.standard_normal((len(group), 16))
    sizes = np.full(len(group), 20, np.int64)
    clusters = made_clusters(sizes, centroid.astype(np.float32))
    assignment = assign("clusters-semantic", int(sizes.sum()), shards, clusters=clusters)
    assert assignment.row_balance == 1.0
    owner = np.empty(clusters.order.shape, np.int64)
    for shard, own in enumerate(owned_ids(assignment)):
        owner[own] = shard
    firsts = owner[clusters.order[clusters.offsets[:-1]]]
    assert all(len(set(firsts[group == each].tolist())) == 1 for each in range(shards))


def test_what_is_missing_is_told() -> None:
    clusters = made_clusters(np.full(4, 50, np.int64))
    cases = [
        (("blocks-hotness", 6400, 2), {}, "give a --shard-trace"),
        (("clusters-semantic", 200, 2), {}, "lexshard index build"),
        (("clusters-semantic", 300, 2), {"clusters": clusters}, "name the index of this model"),
        (("blocks-hotness", 6400, 2), {"counts": np.zeros(6400, np.int64)}, "counts no tokens"),
        (("blocks-round-robin", 6400, 0), {}, "give --shards 1 or more"),
    ]
    for arguments, options, told in cases:
        with pytest.raises(AssignmentError, match=told):
            assign(*arguments, **options)  # type: ignore[arg-type]
