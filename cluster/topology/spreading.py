"""Pieces of unequal work over shards of nearly equal size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
