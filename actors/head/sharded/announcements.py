"""What the root tells the other shards: which rows a step has, what happened to sequences, the end.

Rows travel as the few numbers they are. What does not travel are processors: of a row that has
some, the name of its sequence and its guesses do, and every shard makes them from states of its
own, which it keeps from the same deltas that samplers get.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import NeedKind
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.actors.states.sequence_state import SequenceStates

NO_NAME = -1


class RowNeed(msgspec.Struct, frozen=True, array_like=True):
    """A `Need` without its arrays: its processors are those of ``sequence`` after ``drafted``."""

    kind: NeedKind
    k: int
    min_p: float
    top_p: float
    epsilon: float
    key: int
    position: int
    inverse_temperature: float
    sequence: int = NO_NAME
    drafted: tuple[int, ...] = ()


class StepAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step of these rows follows, hidden states with ``columns`` each, after these deltas."""

    rows: tuple[RowNeed, ...]
    columns: int
    deltas: tuple[Deltas, ...] = ()


class EndAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There will be no more steps."""


Announcement = StepAnnouncement | EndAnnouncement

encode_announcement = msgspec.msgpack.Encoder().encode
decode_announcement = msgspec.msgpack.Decoder(Announcement).decode


def announced_rows(rows: RowTable, names: RowNames | None) -> tuple[RowNeed, ...]:
    """What travels of ``rows``. Raises ValueError for one with processors but without a name."""
    announced = []
    for row, adjustment in enumerate(rows.adjustments):
        sequence = NO_NAME
        drafted: tuple[int, ...] = ()
        if adjustment is not None:
            if names is None:
                raise ValueError(
                    f"row {row} has processors and no name: shards elsewhere make them from the "
                    "state of its sequence, so ask for it through a SequenceHead"
                )
            sequence = names.sequences[row]
            drafted = tuple(names.drafted[row]) if names.drafted else ()
        need = rows.need(row)
        announced.append(
            RowNeed(
                need.kind,
                need.k,
                need.min_p,
                need.top_p,
                need.epsilon,
                need.key,
                need.position,
                need.inverse_temperature,
                sequence,
                drafted,
            )
        )
    return tuple(announced)


def table_of(announced: Sequence[RowNeed], states: SequenceStates) -> RowTable:
    """The same rows with the processors of ``states``."""
    named = [row for row in announced if row.sequence != NO_NAME]
    found = iter(
        states.adjustments([row.sequence for row in named], [row.drafted for row in named])
    )
    return RowTable.of(
        [
            Need(
                row.kind,
                row.k,
                row.min_p,
                row.top_p,
                row.epsilon,
                row.key,
                row.position,
                row.inverse_temperature,
                None if row.sequence == NO_NAME else next(found),
            )
            for row in announced
        ]
    )


class Introduction(msgspec.Struct, frozen=True):
    """What a shard says of itself before the first step: the tokens it owns, int32, and of clusters
    where each begins among them, int64 (`actors.head.paper.clusters.ClusterTokens`)."""

    vocabulary_size: int
    owned: bytes
    clusters: bytes = b""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.owned, np.int32)


encode_introduction = msgspec.msgpack.Encoder().encode
decode_introduction = msgspec.msgpack.Decoder(Introduction).decode
