"""What rows ask of the head, from messages to the flat arrays of the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.messages import Adjustment, Need
from kernels.penalties import Adjustments
from kernels.search import GREEDY, GUMBEL, MIN_P, TOP_K, Needs


def flatten_needs(needs: Sequence[Need]) -> Needs:
    """The search's view of the needs of N rows (none of them dense)."""
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
    return GUMBEL if need.inverse_temperature else GREEDY


@functools.cache
def _no_adjustments(rows: int) -> Adjustments:
    ids, counts = np.empty(0, np.int32), np.empty(0, np.int32)
    offsets, off = np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_)
    zero = np.zeros(rows, np.float32)
    return Adjustments(
        off,
        np.ones(rows, np.float32),
        zero,
        zero,
        ids,
        counts,
        offsets,
        ids,
        np.empty(0, np.float32),
        offsets,
        ids,
        offsets,
        ids,
        offsets,
        off,
    )


def flatten_adjustments(adjustments: Sequence[Adjustment | None]) -> Adjustments:
    """The adjustments of N rows as flat arrays; None is a row without any."""
    given = [adjustment for adjustment in adjustments if adjustment is not None]
    if not given:
        return _no_adjustments(len(adjustments))
    nothing = np.empty(0, np.int32)

    def offsets(sizes: list[int]) -> npt.NDArray[np.int64]:
        return np.cumsum([0, *sizes], dtype=np.int64)

    allowed = [nothing if a is None or a.allowed is None else a.allowed for a in adjustments]
    return Adjustments(
        active=np.array([a is not None for a in adjustments], np.bool_),
        repetition=np.array([1.0 if a is None else a.repetition for a in adjustments], np.float32),
        frequency=np.array([0.0 if a is None else a.frequency for a in adjustments], np.float32),
        presence=np.array([0.0 if a is None else a.presence for a in adjustments], np.float32),
        seen_ids=np.concatenate([a.seen_ids for a in given]),
        output_counts=np.concatenate([a.output_counts for a in given]),
        seen_offsets=offsets([0 if a is None else len(a.seen_ids) for a in adjustments]),
        bias_ids=np.concatenate([a.bias_ids for a in given]),
        bias_values=np.concatenate([a.bias_values for a in given]),
        bias_offsets=offsets([0 if a is None else len(a.bias_ids) for a in adjustments]),
        banned=np.concatenate([a.banned for a in given]),
        banned_offsets=offsets([0 if a is None else len(a.banned) for a in adjustments]),
        allowed=np.concatenate(allowed),
        allowed_offsets=offsets([len(ids) for ids in allowed]),
        restricted=np.array(
            [a is not None and a.allowed is not None for a in adjustments], np.bool_
        ),
    )
