"""What the root tells the other shards: which rows a step has, what happened to sequences, the end.

A step's row table travels as its arrays, but for processors: of a row that has some, the name of
its sequence and its guesses do, and every shard makes them from states of its own, which it keeps
from the same deltas that samplers get.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import NeedKind
from lexshard.actors.packed_arrays import read_array
from lexshard.actors.proposal import NO_TESTS
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.need import Adjustment
from lexshard.actors.states.row_table import RowNames, RowTable, flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.draw import Controls


class StepAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step of N rows follows, hidden states with ``columns`` each, after these deltas. ``names``
    are those of the rows ``adjusted``, which have processors."""

    columns: int
    kinds: tuple[NeedKind, ...]  # [N] this and the next four as in the `RowTable`
    searched: npt.NDArray[np.int64]
    controls: Controls
    min_p: npt.NDArray[np.float64]
    epsilon: npt.NDArray[np.float64]
    adjusted: tuple[int, ...]
    names: RowNames
    deltas: tuple[Deltas, ...] = ()

    def table(self, states: SequenceStates) -> RowTable:
        """The announced rows with the processors of ``states``."""
        names = self.names
        drafted = names.drafted or ((),) * len(names.sequences)
        adjustments: list[Adjustment | None] = [None] * len(self.kinds)
        found = states.adjustments(names.sequences, drafted)
        for row, adjustment in zip(self.adjusted, found, strict=True):
            adjustments[row] = adjustment
        return RowTable(
            kinds=self.kinds,
            searched=self.searched,
            controls=self.controls,
            min_p=self.min_p,
            epsilon=self.epsilon,
            adjustments=tuple(adjustments),
            flat=flatten_adjustments(adjustments),
        )


def announce(
    rows: RowTable, names: RowNames | None, columns: int, deltas: tuple[Deltas, ...] = ()
) -> StepAnnouncement:
    """What travels of ``rows``. Raises ValueError for one with processors but without a name."""
    adjusted = tuple(row for row, each in enumerate(rows.adjustments) if each is not None)
    if names is None and adjusted:
        raise ValueError(
            f"row {adjusted[0]} has processors and no name: shards elsewhere make them from the "
            "state of its sequence, so ask for it through a SequenceHead"
        )
    own = RowNames(()) if names is None else names._replace(tests=NO_TESTS).some(adjusted)
    return StepAnnouncement(
        columns,
        rows.kinds,
        rows.searched,
        rows.controls,
        rows.min_p,
        rows.epsilon,
        adjusted,
        own,
        deltas,
    )


class EndAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There will be no more steps."""


Announcement = StepAnnouncement | EndAnnouncement

decode_announcement = msgspec.msgpack.Decoder(Announcement, dec_hook=read_array).decode


class Introduction(msgspec.Struct, frozen=True):
    """What a shard says of itself before the first step: the tokens it owns, and of clusters where
    each begins among them (`actors.head.paper.clusters.ClusterTokens`)."""

    vocabulary_size: int
    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64] | None = None


decode_introduction = msgspec.msgpack.Decoder(Introduction, dec_hook=read_array).decode
