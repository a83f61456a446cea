"""Which rows of the vocabulary every shard owns.

By blocks of 64 consecutive token ids, whose noise is drawn once for all of them, or by whole
clusters of an index, whose tokens have their noise drawn one by one (`actors.head.owned_rows`). No
token depends on the assignment, only what finding it costs: every shard screens all of its rows in
every step, and rescores those that may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.configuration import ShardAssignmentMethod
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.bounds import Clusters

# How far the rows of a shard that owns clusters may exceed the mean.
CLUSTER_BALANCE = 1.05
_ITERATIONS = 64  # of a power iteration

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]


class AssignmentError(ValueError):
    """An assignment that cannot be made, with one line that says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardAssignment:
    """What every shard owns; ``work`` is the share of a trace's tokens that are each shard's, None
    without a trace."""

    method: ShardAssignmentMethod
    owned: tuple[OwnedRows, ...]  # per shard
    work: tuple[float, ...] | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """How many tokens every shard owns."""
        return tuple(len(own.ids) for own in self.owned)

    @property
    def row_balance(self) -> float:
        """The most rows of a shard over the mean: what a step waits for. 1 is even."""
        return max(self.rows) / (sum(self.rows) / len(self.rows))

    @property
    def work_balance(self) -> float | None:
        """The same of the shares of the trace."""
        return None if self.work is None else max(self.work) * len(self.work)


def assign(
    method: ShardAssignmentMethod,
    vocabulary_size: int,
    shards: int,
    *,
    clusters: Clusters | None = None,
    counts: Counts | None = None,
) -> ShardAssignment:
    """Divide the vocabulary among ``shards``.

    ``clusters`` are those of an index, which methods by cluster need; ``counts`` [V] say how often
    each token stands in a trace, which methods by hotness need.

    Raises AssignmentError where there are more shards than blocks or clusters, or where clusters or
    counts are missing or of another vocabulary.
    """
    if shards < 1:
        raise AssignmentError(f"{shards} shards own nothing: give --shards 1 or more")
    if counts is not None and (len(counts) != vocabulary_size or not counts.any()):
        raise AssignmentError(
            f"the trace counts no tokens of a vocabulary of {vocabulary_size}: give one that was "
            "made with this model's tokenizer"
        )
    if counts is None and method.endswith("hotness"):
        raise AssignmentError(
            f"{method} goes by how often tokens are drawn: give a --shard-trace, or another "
            "--shard-assignment"
        )
    if method.startswith("blocks"):
        blocks = _by_blocks(method, vocabulary_size, shards, counts)
        owned = tuple(OwnedRows.of_blocks(own.tolist(), vocabulary_size) for own in blocks)
    else:
        tokens = _by_clusters(method, vocabulary_size, shards, clusters, counts)
        owned = tuple(OwnedRows.of_tokens(own, vocabulary_size) for own in tokens)
    if counts is None:
        return ShardAssignment(method, owned)
    total = int(counts.sum())
    return ShardAssignment(method, owned, tuple(counts[own.ids].sum() / total for own in owned))


def _by_blocks(
    method: ShardAssignmentMethod, vocabulary_size: int, shards: int, counts: Counts | None
) -> list[Ids]:
    """The blocks of every shard."""
    rows = np.full(blocks_of(vocabulary_size), BLOCK, np.int64)
    rows[-1] = vocabulary_size - BLOCK * (len(rows) - 1)  # the last one may be partly empty
    if shards > len(rows):
        raise AssignmentError(
            f"{shards} shards are more than the {len(rows)} blocks of {BLOCK} ids in a vocabulary "
            f"of {vocabulary_size}: give --shards {len(rows)} or fewer"
        )
    blocks = np.arange(len(rows), dtype=np.int32)
    if method == "blocks-round-robin":
        return [blocks[first::shards] for first in range(shards)]
    if method == "blocks-contiguous":
        return np.array_split(blocks, shards)
    assert counts is not None
    work = np.add.reduceat(counts, BLOCK * blocks.astype(np.int64))
    most = BLOCK * -(-len(rows) // shards)
    return spread(work, rows, shards, most_rows=most)


def _by_clusters(
    method: ShardAssignmentMethod,
    vocabulary_size: int,
    shards: int,
    clusters: Clusters | None,
    counts: Counts | None,
) -> list[Ids]:
    """The tokens of every shard."""
    if clusters is None:
        raise AssignmentError(
            f"{method} needs the clusters of an index: make one with `lexshard index build MODEL`"
        )
    if len(clusters.order) != vocabulary_size:
        raise AssignmentError(
            f"the clusters are of {len(clusters.order)} tokens, the vocabulary has "
            f"{vocabulary_size}: name the index of this model"
        )
    filled = np.flatnonzero(clusters.sizes)
    rows = clusters.sizes[filled]
    if shards > len(filled):
        raise AssignmentError(
            f"{shards} shards are more than the {len(filled)} clusters of the index: give --shards "
            f"{len(filled)} or fewer, or assign blocks"
        )
    parts: Sequence[npt.NDArray[np.integer]]
    if method == "clusters-round-robin":
        parts = [np.arange(first, len(filled), shards) for first in range(shards)]
    elif method == "clusters-semantic":
        parts = semantic_parts(clusters.centroid[filled], rows, shards)
    else:
        assert counts is not None
        starts = clusters.offsets[filled]
        work = np.add.reduceat(counts[clusters.order], starts)
        most = int(CLUSTER_BALANCE * vocabulary_size / shards)
        parts = spread(work, rows, shards, most_rows=most)
    spans = np.split(clusters.order, clusters.offsets[1:-1])
    return [np.concatenate([spans[each] for each in filled[part]]) for part in parts]


def spread(
    work: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], shards: int, *, most_rows: int
) -> list[npt.NDArray[np.int32]]:
    """The pieces of every shard, ascending: ``work`` [P] and ``rows`` [P] evened out.

    Longest processing time first (Graham, 1969) with room for ``most_rows`` per shard: the piece
    with most work goes to the shard with the least so far that has room for it. Pieces without work
    go to the shard with the fewest rows, and so does a piece that finds no room. Every shard gets
    one where there are as many as shards.
    """
    order = np.lexsort((np.arange(len(work)), -rows, -work))
    owners = np.empty(len(work), np.int64)
    own_work, own_rows = np.zeros(shards, np.int64), np.zeros(shards, np.int64)
    for piece in order.tolist():
        roomy = np.flatnonzero(own_rows + rows[piece] <= most_rows)
        if work[piece] == 0 or not len(roomy):
            shard = int(np.argmin(own_rows))
        else:
            shard = int(roomy[np.lexsort((own_rows[roomy], own_work[roomy]))[0]])
        owners[piece] = shard
        own_work[shard] += work[piece]
        own_rows[shard] += rows[piece]
    return [np.flatnonzero(owners == shard).astype(np.int32) for shard in range(shards)]


def semantic_parts(
    centroid: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], shards: int
) -> list[npt.NDArray[np.int64]]:
    """The clusters of every shard, ascending, from ``centroid`` [C, d] and ``rows`` [C].

    All clusters are cut in two along the direction in which their centroids differ most (the first
    principal component, weighted by rows), each part with rows in proportion to the shards it is
    for, and so on until every part is a shard's.
    """
    parts: list[npt.NDArray[np.int64]] = []
    left = [(np.arange(len(rows)), shards)]
    while left:
        part, count = left.pop()
        if count == 1:
            parts.append(np.sort(part))
            continue
        order = part[np.argsort(_projections(centroid[part], rows[part]), kind="stable")]
        first = count // 2
        cut = _cut(rows[order], first, count)
        left += [(order[cut:], count - first), (order[:cut], first)]
    return parts


def _cut(rows: npt.NDArray[np.int64], first: int, count: int) -> int:
    """How many leave ``first / count`` of all rows before the cut, and a cluster per shard on
    either side."""
    before = np.cumsum(rows)
    nearest = int(np.argmin(np.abs(before - before[-1] * first / count))) + 1
    return min(max(nearest, first), len(rows) - (count - first))


def _projections(
    centroid: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Where every centroid lies [C] along their first principal component, by power iteration."""
    centred = centroid.astype(np.float64)
    centred -= np.average(centred, axis=0, weights=rows)
    direction = centred[np.argmax(np.square(centred).sum(axis=1))].copy()
    for _ in range(_ITERATIONS):
        length = np.linalg.norm(direction)
        if length == 0:  # all centroids are the same
            break
        direction = centred.T @ (rows * (centred @ (direction / length)))
    return centred @ direction
