"""What rows ask of a search on a device, as the bytes that travel there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.rounding import INFLATION
from lexshard.kernels.search import Needs
from lexshard.kernels.search.gpu.triton_adjust import ENTRY, REALS
from lexshard.kernels.search.gpu.triton_bounds import INTEGERS

Ids = npt.NDArray[np.int32]
NO_TOKEN = np.int32(2**31 - 1)  # stands behind all tokens


def pack_questions(
    needs: Needs, controls: Controls
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """`Questions.integers` and ``reals`` of rows that search for ``needs`` and draw by
    ``controls``, without adjustments."""
    integers = np.empty((len(needs.kind), INTEGERS), np.int64)
    integers[:, 0] = needs.kind
    integers[:, 1] = needs.k
    integers[:, 2] = (needs.key & np.uint64(0xFFFFFFFF)).astype(np.int64)
    integers[:, 3] = (needs.key >> np.uint64(32)).astype(np.int64)
    integers[:, 4] = needs.position.astype(np.int64)
    reals = np.empty((len(needs.kind), REALS), np.float64)
    reals[:, 0] = needs.inverse_temperature
    reals[:, 1] = needs.log_min_p
    reals[:, 2] = 1.0
    reals[:, 3] = 0.0
    reals[:, 4] = controls.top_p
    reals[:, 5] = controls.log_min_p
    reals[:, 6:] = 0.0
    return integers, reals


class PackedSupport(NamedTuple):
    """`Support` on the host, and what adjusting does to errors: per row the largest slope, and
    how much the largest adjustment can add (`Questions.reals`)."""

    offsets: npt.NDArray[np.int64]  # [N + 1]
    entries: npt.NDArray[np.int32]  # [S, 6]
    slope: npt.NDArray[np.float64]  # [N]
    size: npt.NDArray[np.float64]  # [N]


def pack_support(
    adjustments: Adjustments, seen: Sequence[Ids], vocabulary_size: int, *, grows: bool = False
) -> PackedSupport:
    """The adjusted tokens of N rows below ``vocabulary_size``, of which ``seen`` [N] are the sorted
    ids that the rows' tables count. What masks leave out is not among them. Where it ``grows``,
    there is room for one more token that each penalised row will have seen."""
    a = adjustments
    rows = len(a.active)
    slope, size = np.ones(rows), np.zeros(rows)
    entries = [np.empty((0, ENTRY), np.int32)]
    counts = np.zeros(rows, np.int64)
    for row in np.flatnonzero(a.active).tolist():
        ids, terms = _row_support(a, row, seen[row], vocabulary_size)
        one_more = grows and a.table[row] >= 0
        if one_more:
            ids = np.append(ids, NO_TOKEN)
            last = np.array([[0.0, a.repetition[row], 0.0, 0.0]], np.float32)
            terms = np.concatenate([terms, last])
        with np.errstate(divide="ignore"):
            steepest = float(np.maximum(terms[:, 1], 1.0 / terms[:, 1]).max(initial=1.0))
        if steepest > 1.0:
            slope[row] = steepest * INFLATION
        added = np.where(np.isfinite(terms[:, 0]), np.abs(terms[:, 0]), 0.0)
        added += np.abs(terms[:, 2]) + np.abs(terms[:, 3])
        most = float(added.max(initial=0.0))
        if one_more:
            most += abs(float(a.frequency[row])) + abs(float(a.presence[row]))
        size[row] = most * INFLATION
        own = np.empty((len(ids), ENTRY), np.int32)
        own[:, 0], own[:, 1] = row, ids
        own[:, 2:] = terms.view(np.int32)
        entries.append(own)
        counts[row] = len(ids)
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    return PackedSupport(offsets, np.concatenate(entries), slope, size)


def _row_support(
    a: Adjustments, row: int, seen_ids: Ids, vocabulary_size: int
) -> tuple[Ids, npt.NDArray[np.float32]]:
    """The adjusted ids [S] of a row, sorted, and their terms [S, 4].

    What a row has seen travels to the device as a list: its length, unlike what the host's search
    does with the table, grows with the history.
    """
    bias = slice(a.bias_offsets[row], a.bias_offsets[row + 1])
    banned = a.banned[a.banned_offsets[row] : a.banned_offsets[row + 1]]
    bias_ids = a.bias_ids[bias]
    ids = seen_ids
    if len(bias_ids) or len(banned):
        ids = np.unique(np.concatenate([seen_ids, bias_ids, banned]))
    terms = np.zeros((len(ids), ENTRY - 2), np.float32)
    terms[np.searchsorted(ids, bias_ids), 0] = a.bias_values[bias]
    terms[np.searchsorted(ids, banned), 0] = -np.inf
    terms[:, 1] = 1.0
    if len(seen_ids):
        places = np.searchsorted(ids, seen_ids)
        counts = (a.tables[a.table[row], seen_ids] - 1).astype(np.float32)
        terms[places, 1] = a.repetition[row]
        terms[places, 2] = a.frequency[row] * counts
        terms[places, 3] = np.where(counts > 0, a.presence[row], np.float32(0.0))
    below = ids < vocabulary_size
    return ids[below], terms[below]
