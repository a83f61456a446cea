"""What rows ask of the head, from messages to the flat arrays of the kernels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lexshard.actors.states.need import Adjustment, Need
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import GREEDY, GUMBEL, MIN_P, TOP_K, Needs

NO_IDS = np.empty(0, np.int32)
NO_VALUES = np.empty(0, np.float32)
NO_TABLES = np.zeros((0, 0), np.int32)
# What stands for a row without processors among rows that have some.
UNADJUSTED = Adjustment(1.0, 0.0, 0.0, None, -1, NO_IDS, NO_VALUES, NO_IDS, None)


def flatten_needs(needs: Sequence[Need]) -> Needs:
    """The search's view of the needs of N rows, none of them dense but those with a guess: nothing
    is searched for these."""
    return Needs(
        kind=np.array([_kind(need) for need in needs], np.int64),
        k=np.array([need.k for need in needs], np.int64),
        log_min_p=np.array(
            [math.log(need.min_p) if need.kind == "minp" else 0.0 for need in needs], np.float64
        ),
        key=np.array([need.key for need in needs], np.uint64),
        position=np.array([need.position for need in needs], np.uint64),
        inverse_temperature=np.array([need.inverse_temperature for need in needs], np.float64),
    )


def _kind(need: Need) -> int:
    if need.kind == "topk":
        return TOP_K
    if need.kind == "minp":
        return MIN_P
    return GUMBEL if need.inverse_temperature and need.kind != "dense" else GREEDY


@functools.cache
def _no_offsets(rows: int) -> npt.NDArray[np.int64]:
    return np.zeros(rows + 1, np.int64)


@functools.cache
def _no_adjustments(rows: int) -> Adjustments:
    offsets, off = _no_offsets(rows), np.zeros(rows, np.bool_)
    zero = np.zeros(rows, np.float32)
    return Adjustments(
        off,
        np.ones(rows, np.float32),
        zero,
        zero,
        NO_TABLES,
        np.full(rows, -1, np.int64),
        NO_IDS,
        NO_VALUES,
        offsets,
        NO_IDS,
        offsets,
        NO_IDS,
        offsets,
        off,
    )


def flatten_adjustments(adjustments: Sequence[Adjustment | None]) -> Adjustments:
    """The adjustments of N rows as flat arrays; None is a row without any."""
    rows = [UNADJUSTED if a is None else a for a in adjustments]
    if all(row is UNADJUSTED for row in rows):
        return _no_adjustments(len(rows))
    tables, table = _flatten_tables(rows)
    bias_ids, bias_offsets = _ragged([row.bias_ids for row in rows])
    banned, banned_offsets = _ragged([row.banned for row in rows])
    lists = [row.allowed for row in rows]
    allowed, allowed_offsets = _ragged([NO_IDS if each is None else each for each in lists])
    return Adjustments(
        active=np.array([row is not UNADJUSTED for row in rows], np.bool_),
        repetition=np.array([row.repetition for row in rows], np.float32),
        frequency=np.array([row.frequency for row in rows], np.float32),
        presence=np.array([row.presence for row in rows], np.float32),
        tables=tables,
        table=table,
        bias_ids=bias_ids,
        bias_values=np.concatenate([row.bias_values for row in rows])
        if len(bias_ids)
        else NO_VALUES,
        bias_offsets=bias_offsets,
        banned=banned,
        banned_offsets=banned_offsets,
        allowed=allowed,
        allowed_offsets=allowed_offsets,
        restricted=np.array([each is not None for each in lists], np.bool_),
    )


def _ragged(
    parts: list[npt.NDArray[np.int32]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """All parts one after the other and where each begins and ends [N + 1]."""
    sizes = [len(part) for part in parts]
    if not any(sizes):
        return NO_IDS, _no_offsets(len(parts))
    return np.concatenate(parts), np.array([0, *itertools.accumulate(sizes)], np.int64)


def _flatten_tables(
    rows: Sequence[Adjustment],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The tables of all rows and each row's place in them: by reference where all rows share them,
    otherwise a copy of the rows in use."""
    tables = [row.tables if row.table >= 0 else None for row in rows]
    distinct = {id(each): each for each in tables if each is not None}
    if not distinct:
        return NO_TABLES, np.full(len(rows), -1, np.int64)
    if len(distinct) == 1:
        return next(iter(distinct.values())), np.array([row.table for row in rows], np.int64)
    used = [each[row.table] for row, each in zip(rows, tables, strict=True) if each is not None]
    width = min(map(len, used))
    some = np.array([each is not None for each in tables])
    return np.stack([each[:width] for each in used]), np.where(some, np.cumsum(some) - 1, -1)
