"""The row table: what the rows of a step ask of head and samplers, as the flat arrays of kernels.

It is built once a step (`actors.states.sequence_state.SequenceStates.table`) from the names of the
rows, which are all that travels to those that keep sequences elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import NeedKind
from lexshard.actors.proposal import NO_TESTS, GuessTest
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.need import Adjustment, Need
from lexshard.kernels.decision import PackedRows
from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import GREEDY, GUMBEL, MIN_P, TOP_K, Needs

NO_IDS = np.empty(0, np.int32)
NO_VALUES = np.empty(0, np.float32)
NO_TABLES = np.zeros((0, 0), np.int32)
NO_MASKS = np.zeros((0, 0), np.uint64)
# What stands for a row without processors among rows that have some.
UNADJUSTED = Adjustment(1.0, 0.0, 0.0, None, -1, NO_IDS, NO_VALUES, NO_IDS, None)


class RowNames(NamedTuple):
    """Whose rows they are: row ``r`` draws for ``sequences[r]`` after its own tokens and the
    guesses ``drafted[r]``; ``drafted`` is empty where no row assumes any. ``tests`` are the guesses
    that rows test by distributions instead of drawing. ``masks`` are those of grammars, empty where
    no row has one. ``unknown`` tokens come before each row that a device alone knows: what a row
    asks is without them, but for its position. A step makes these anew."""

    sequences: tuple[int, ...]  # [N]
    drafted: tuple[tuple[int, ...], ...] = ()  # [N] or none
    tests: Mapping[int, GuessTest] = NO_TESTS  # by row
    masks: tuple[Mask | None, ...] = ()  # [N] or none
    unknown: int = 0

    def some(self, rows: Sequence[int]) -> RowNames:
        """Those of ``rows``, in this order."""
        return RowNames(
            tuple(self.sequences[row] for row in rows),
            tuple(self.drafted[row] for row in rows) if self.drafted else (),
            {place: self.tests[row] for place, row in enumerate(rows) if row in self.tests}
            if self.tests
            else NO_TESTS,
            tuple(self.masks[row] for row in rows) if self.masks else (),
            self.unknown,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """What N rows ask.

    ``controls`` and ``adjustments`` hold for head and samplers; ``flat`` are the adjustments as
    arrays, and ``packed`` both as the decision of candidates wants them, where no row has lists of
    ids and something decides. ``kinds`` are the guarantees that a head gives (see `Need`),
    ``searched`` how the search takes them. ``guesses`` are those of rows that a head may decide by
    bounds. ``logprobs`` are how many log-probabilities a row's request wants.
    """

    kinds: tuple[NeedKind, ...]  # [N]
    searched: npt.NDArray[np.int64]  # [N]
    controls: Controls
    min_p: npt.NDArray[np.float64]  # [N]
    epsilon: npt.NDArray[np.float64]  # [N]
    adjustments: tuple[Adjustment | None, ...]  # [N]
    flat: Adjustments
    guesses: Mapping[int, GuessTest] = field(default_factory=dict)  # by row
    logprobs: tuple[int | None, ...] = ()  # [N] or none
    packed: PackedRows | None = None
    _needs: Needs = field(init=False, repr=False)

    def __len__(self) -> int:
        return len(self.kinds)

    @classmethod
    def of(cls, needs: Sequence[Need]) -> RowTable:
        """The rows of these needs."""
        adjustments = tuple(need.adjustment for need in needs)
        return cls(
            kinds=tuple(need.kind for need in needs),
            searched=np.array(
                [search_kind(need.kind, need.inverse_temperature) for need in needs], np.int64
            ),
            controls=Controls(
                inverse_temperature=np.array([n.inverse_temperature for n in needs], np.float64),
                top_k=np.array([need.k for need in needs], np.int64),
                top_p=np.array([need.top_p for need in needs], np.float64),
                log_min_p=np.array([_log_min_p(need) for need in needs], np.float64),
                key=np.array([need.key for need in needs], np.uint64),
                position=np.array([need.position for need in needs], np.uint64),
            ),
            min_p=np.array([need.min_p for need in needs], np.float64),
            epsilon=np.array([need.epsilon for need in needs], np.float64),
            adjustments=adjustments,
            flat=flatten_adjustments(adjustments),
            guesses={row: need.guess for row, need in enumerate(needs) if need.guess is not None},
        )

    def need(self, row: int) -> Need:
        """What one row asks."""
        controls = self.controls
        return Need(
            self.kinds[row],
            int(controls.top_k[row]),
            float(self.min_p[row]),
            float(controls.top_p[row]),
            float(self.epsilon[row]),
            int(controls.key[row]),
            int(controls.position[row]),
            float(controls.inverse_temperature[row]),
            self.adjustments[row],
            self.guesses.get(row),
        )

    def some(self, rows: Sequence[int]) -> RowTable:
        """Those of ``rows``, in this order."""
        chosen = list(rows)
        if chosen == list(range(len(self))):
            return self
        adjustments = tuple(self.adjustments[row] for row in chosen)
        return RowTable(
            kinds=tuple(self.kinds[row] for row in chosen),
            searched=self.searched[chosen],
            controls=Controls(
                self.controls.inverse_temperature[chosen],
                self.controls.top_k[chosen],
                self.controls.top_p[chosen],
                self.controls.log_min_p[chosen],
                self.controls.key[chosen],
                self.controls.position[chosen],
            ),
            min_p=self.min_p[chosen],
            epsilon=self.epsilon[chosen],
            adjustments=adjustments,
            flat=flatten_adjustments(adjustments),
            guesses={
                place: self.guesses[row] for place, row in enumerate(chosen) if row in self.guesses
            },
            logprobs=tuple(self.logprobs[row] for row in chosen) if self.logprobs else (),
        )

    def masked(self, masks: Sequence[Mask | None]) -> RowTable:
        """The same rows with other masks [N]; each has one where it had one before."""
        adjustments = tuple(
            replace(before, mask=mask) if before is not None and mask is not None else before
            for before, mask in zip(self.adjustments, masks, strict=True)
        )
        words, mask = _flatten_masks([UNADJUSTED if a is None else a for a in adjustments])
        flat = self.flat._replace(masks=words, mask=mask)
        return replace(self, adjustments=adjustments, flat=flat)

    def __post_init__(self) -> None:
        controls = self.controls
        needs = Needs(
            kind=self.searched,
            k=controls.top_k,
            log_min_p=np.where(self.searched == MIN_P, controls.log_min_p, 0.0),
            key=controls.key,
            position=controls.position,
            inverse_temperature=controls.inverse_temperature,
        )
        object.__setattr__(self, "_needs", needs)

    def search(self) -> Needs:
        """What is searched for; of dense rows nothing is. Made once: it has the same arrays."""
        return self._needs


def search_kind(kind: NeedKind, inverse_temperature: float) -> int:
    """How the search takes a guarantee."""
    if kind == "topk":
        return TOP_K
    if kind == "minp":
        return MIN_P
    return GUMBEL if inverse_temperature and kind != "dense" else GREEDY


def _log_min_p(need: Need) -> float:
    return math.log(need.min_p) if need.min_p > 0 or need.kind == "minp" else -math.inf


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
        NO_MASKS,
        np.full(rows, -1, np.int64),
    )


def flatten_adjustments(adjustments: Sequence[Adjustment | None]) -> Adjustments:
    """The adjustments of N rows as flat arrays; None is a row without any."""
    rows = [UNADJUSTED if a is None else a for a in adjustments]
    if all(row is UNADJUSTED for row in rows):
        return _no_adjustments(len(rows))
    tables, table = _flatten_tables(rows)
    bias_ids, bias_offsets = _ragged([row.bias_ids for row in rows])
    banned, banned_offsets = _ragged([row.banned for row in rows])
    masks, mask = _flatten_masks(rows)
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
        masks=masks,
        mask=mask,
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


def _flatten_masks(
    rows: Sequence[Adjustment],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """The masks of all rows, each once, and each row's place among them."""
    places: dict[Mask, int] = {}
    own = [-1 if row.mask is None else places.setdefault(row.mask, len(places)) for row in rows]
    return np.stack([each.words for each in places]) if places else NO_MASKS, np.array(own)
